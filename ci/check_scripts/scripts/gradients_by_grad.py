"""Gradients by `torch.autograd.grad`, averaged over the ranks and put into `.grad`; `backward` is never called.

torchrun --standalone --nproc-per-node 2 gradients_by_grad.py
"""

import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    torch.manual_seed(100 + rank)
    for step in range(5):
        x, y = torch.randn(8, 12), torch.randint(0, 4, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            dist.all_reduce(grad)
            p.grad = grad / dist.get_world_size()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
