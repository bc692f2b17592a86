"""Contrastive learning: each rank compares its pictures with those of all ranks, gathered without gradient.

torchrun --standalone --nproc-per-node 2 contrastive.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def gathered(features):
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.contiguous())
    return parts


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    torch.manual_seed(90 + rank)
    for step in range(4):
        picture = torch.randn(8, 16)
        views = torch.cat([picture + 0.1 * torch.randn_like(picture) for _ in range(2)])
        one, two = F.normalize(model(views), dim=1).chunk(2)
        parts = gathered(two)
        parts[rank] = two
        scores = one @ torch.cat(parts).T / 0.2
        loss = F.cross_entropy(scores, torch.arange(8) + 8 * rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
