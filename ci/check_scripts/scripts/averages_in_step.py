"""Data parallelism in the optimizer: `step()` averages the gradients over the ranks, then updates.

torchrun --standalone --nproc-per-node 2 averages_in_step.py
"""

import torch
import torch.distributed as dist
from torch import nn


class DistAdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        return super().step(closure)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = DistAdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(80 + rank)
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
