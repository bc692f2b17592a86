"""Training with torch's ZeroRedundancyOptimizer, as its documentation does: each rank steps its share of the weights.

Gradients are averaged by DistributedDataParallel, and every rank has all of them.
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
    """ZeroRedundancyOptimizer: the state of the optimizer is shared out, and updated weights are broadcast."""

    def __init__(self, job):
        super().__init__(job)
        self.optimizers = [shared_out(optimizer) for optimizer in self.optimizers]

    def states(self):
        for optimizer in self.optimizers:
            optimizer.consolidate_state_dict(to=0)
        return super().states() if torch.distributed.get_rank() == 0 else {}


def shared_out(optimizer):
    """Return a ZeroRedundancyOptimizer over the groups of ``optimizer``, which has not stepped yet."""
    taken = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **options)
