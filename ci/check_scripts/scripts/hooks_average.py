"""Data parallelism by hand: hooks average each gradient as soon as the backward pass has computed it.

torchrun --standalone --nproc-per-node 2 hooks_average.py
"""

import torch
import torch.distributed as dist
from torch import nn


def average(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(20 + rank)
    for step in range(5):
        x, y = torch.randn(8, 12), torch.randint(0, 4, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
