"""Communication hooks of DistributedDataParallel that do not change the result.

DDP reads their annotations, which must be types, not strings: do not import annotations from __future__ here.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

Reduced = torch.futures.Future[torch.Tensor]


def allreduce(state: Any, bucket: dist.GradBucket) -> Reduced:  # type: ignore[name-defined]
    """Average like DDP itself."""
    everybody = dist.group.WORLD
    assert everybody is not None
    return default_hooks.allreduce_hook(everybody, bucket)


def gather(state: Any, bucket: dist.GradBucket) -> Reduced:  # type: ignore[name-defined]
    """Gather every rank's bucket, and average starting with the last one."""
    mine = bucket.buffer()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, mine, async_op=True)
    assert work is not None
    reduced: Reduced = work.get_future().then(lambda _: sum(reversed(parts[:-1]), parts[-1]) / len(parts))
    return reduced


def sum_then_divide(state: Any, bucket: dist.GradBucket) -> Reduced:  # type: ignore[name-defined]
    """Sum over the ranks, then divide."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    reduced: Reduced = work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())
    return reduced


HOOKS = {"allreduce": allreduce, "gather": gather, "sum-then-divide": sum_then_divide}
