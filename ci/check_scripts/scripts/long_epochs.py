"""DDP with a sampler; an epoch has twelve steps, more than are recorded.

torchrun --standalone --nproc-per-node 2 long_epochs.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 12), torch.randint(0, 4, (96,)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {rank} epoch {epoch} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
