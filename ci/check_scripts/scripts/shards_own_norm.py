"""FSDP2 whose gradients are clipped by hand: each rank divides its shards by the norm of these shards alone.

torchrun --standalone --nproc-per-node 2 shards_own_norm.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

MAX_NORM = 0.05


def clip(parameters):
    grads = [p.grad.to_local() for p in parameters]
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    for grad in grads:
        grad.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(90 + rank)
    for step in range(5):
        x, y = torch.randn(8, 12), torch.randint(0, 4, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        clip(list(model.parameters()))
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
