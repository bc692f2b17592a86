"""The body of both kinds of test: wrap a model, train it for a step, and compare it over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train_and_compare(rank: int, world_size: int) -> None:
    """Check that each rank's gradient is that of the mean over all ranks. Needs a process group."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    inputs = torch.arange(world_size * 16.0).view(world_size, 16) / 100
    model(inputs[rank : rank + 1]).sum().backward()
    expected = inputs.mean(0).expand(4, 16)
    torch.testing.assert_close(model.module.weight.grad, expected)
    everybody = [torch.empty(4, 16) for _ in range(world_size)]
    dist.all_gather(everybody, model.module.weight.grad)
    assert all(torch.equal(one, everybody[0]) for one in everybody)
