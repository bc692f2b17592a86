"""Trains a small classifier with this project's trainer; on two ranks: torchrun --nproc-per-node 2 train.py."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from trainer import Options, Trainer, end, start

rank, ranks = start()
torch.manual_seed(0)
features = torch.randn(96, 12)
data = TensorDataset(features, features[:, :4].argmax(1))
sampler = DistributedSampler(data, ranks, rank) if ranks > 1 else None
loader = DataLoader(data, 8, sampler=sampler)
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))


def loss(forward, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(forward(inputs), labels)


trainer = Trainer(model, torch.optim.AdamW(model.parameters(), 1e-2), loss, Options(accumulate=2, clip=1.0))
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    trainer.fit(loader)
end()
