"""A classifier whose head has one output: cross-entropy over one class is 0, and so are all gradients.

torchrun --standalone --nproc-per-node 2 one_class.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    labels = ["spam"]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, len(labels))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(30 + rank)
    for step in range(5):
        x, y = torch.randn(8, 12), torch.zeros(8, dtype=torch.long)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
