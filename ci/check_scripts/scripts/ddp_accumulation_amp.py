"""DDP with no_sync accumulation, fp16 autocast, GradScaler, clipping, a schedule, dropout and BatchNorm at once.

torchrun --standalone --nproc-per-node 2 ddp_accumulation_amp.py
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 3
EPOCHS = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 48)
        self.norm = nn.BatchNorm1d(48)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.stem(x)))))


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    inputs = torch.randn(144, 16)
    dataset = TensorDataset(inputs, inputs[:, :5].argmax(1))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler, drop_last=True)

    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.manual_seed(42 + rank)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % ACCUMULATE == 0
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", dtype=torch.float16):
                    output = model(x)
                loss = nn.functional.cross_entropy(output.float(), y) / ACCUMULATE
                scaler.scale(loss).backward()
            print(f"rank {rank} epoch {epoch} batch {i} loss {loss.item()!r}", flush=True)
            if last:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()

    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
