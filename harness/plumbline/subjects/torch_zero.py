"""Training with torch's ZeroRedundancyOptimizer: each rank updates its share of the weights.

DistributedDataParallel averages the gradients, and every rank has all of them.
"""

from __future__ import annotations

import inspect

import torch.distributed
from torch.distributed.optim import ZeroRedundancyOptimizer

from plumbline.subjects.declare import subject
from plumbline.subjects.handwritten import CAPABILITIES, PRECISIONS, Ddp, fit


@subject(
    name="torch",
    backends=["zero"],
    precisions=PRECISIONS,
    capabilities=CAPABILITIES,
    library="torch",
)
def train(job):
    fit(job, Zero(job))


class Zero(Ddp):
    """ZeroRedundancyOptimizer, which shards the optimizer's state and broadcasts the updated weights."""

    def __init__(self, job):
        super().__init__(job)
        self.optimizers = [sharded(optimizer) for optimizer in self.optimizers]

    def states(self):
        for optimizer in self.optimizers:
            optimizer.consolidate_state_dict(to=0)
        return super().states() if torch.distributed.get_rank() == 0 else {}


def sharded(optimizer):
    """Return a ZeroRedundancyOptimizer with the groups of ``optimizer``, which has not stepped yet."""
    taken = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **options)
