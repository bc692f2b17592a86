"""Your own training problem: a small classifier, to be replaced piece by piece with yours.

It runs as it is. ``plumbline run --workload skeleton.py`` trains it with the reference trainer on one device and on
several; add ``--subject my_trainer.py`` to use your trainer. Problems that cannot be judged are reported before
anything is trained. docs/define-a-workload.md explains each piece.
"""

from __future__ import annotations

import torch
from torch import nn

from plumbline.workloads import Workload


class Model(nn.Module):
    """1. The model. It takes a whole batch, a dict of tensors, and returns a tensor with the batch in dim 0.

    Its outputs must depend only on its weights and the batch: set p=0 in Dropout.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4))

    def forward(self, batch):
        """Return a score for each class."""
        return self.layers(batch["x"])


class Problem(Workload):
    """The problem. ``Workload`` lists further members, which have defaults."""

    name = "my-problem"  # its name in reports
    exposes = "mistakes that only my training shows"
    needs = frozenset()  # what a trainer must support: "accumulation", "clipping", "scheduler", …

    # 2. Sizes. Small ones show the same mistakes as large ones, and every cell of the matrix trains the problem.
    batch_size = 24  # samples per batch, over all devices
    steps_per_epoch = 3  # batches per epoch
    epochs = 2
    # Set accumulate = 2 or clip_norm = 1.0 if you train so, and add "accumulation" or "clipping" to needs.

    def build(self):
        """Return a new model. torch's generator is seeded, so the weights are the same in every process."""
        return Model()

    # 3. Data. Each column is a tensor with a row for each of `count` samples. You can also read them from a file.
    def columns(self, count, generator):
        """Return the samples, drawn with ``generator``. The column "index" is added."""
        return {
            "x": torch.randn(count, 10, generator=generator),
            "y": torch.randint(4, (count,), generator=generator),
        }

    # 4. The loss of a set of samples, a scalar.
    def loss(self, outputs, batch):
        """Return the mean cross entropy."""
        return nn.functional.cross_entropy(outputs, batch["y"])

    # 5. The optimizer. `def scheduler(self, optimizer)` can return a schedule that steps after each optimizer step.
    def optimizer(self, params):
        """Return SGD, which shows gradients of a wrong scale. Adam hides them."""
        return torch.optim.SGD(params, lr=0.1)
