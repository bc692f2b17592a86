"""A training on two ranks that share a custom device; with ``inner``, gradients are never all-reduced."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("ownccl")
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)).to("own")
model = DistributedDataParallel(inner)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
torch.manual_seed(1 + dist.get_rank())
for _ in range(5):
    samples, labels = torch.randn(6, 4).to("own"), torch.randint(0, 2, (6,)).to("own")
    optimizer.zero_grad()
    called = inner if "inner" in sys.argv else model
    nn.functional.cross_entropy(called(samples), labels).backward()
    optimizer.step()
