"""A training problem of your own: a small classifier, to be replaced by yours piece by piece.

It runs as it is. ``plumbline run --workload skeleton.py`` trains it on one device and on several with the reference
trainer, ``--subject my_trainer.py`` with yours; what cannot be judged is said in a sentence before anything starts.
The page docs/define-a-workload.md of Plumbline's documentation has a section for each piece.
"""

from __future__ import annotations

import torch
from torch import nn

from plumbline.workloads import Workload


class Model(nn.Module):
    """1. The model. It is called with a whole batch, a dict of tensors, and returns a tensor with the batch in dim 0.

    What it returns must follow from its weights and the batch alone: set the p of Dropout to 0.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4))

    def forward(self, batch):
        """Return a score for each class."""
        return self.layers(batch["x"])


class Problem(Workload):
    """What is trained: of the members that are not here each has a default, ``Workload`` lists them."""

    name = "my-problem"  # as reports call it
    exposes = "what goes wrong in my training, and nowhere else"
    needs = frozenset()  # what a trainer must be able to do for this: "accumulation", "clipping", "scheduler", …

    # 2. Sizes. Small ones show the same mistakes as large ones: each cell of the matrix trains this once.
    batch_size = 24  # samples of one batch over all devices
    steps_per_epoch = 3  # batches of one epoch
    epochs = 2
    # accumulate = 2, clip_norm = 1.0: as you train; name them in needs.

    def build(self):
        """Return a new model. torch's generator is seeded: the weights are the same in every process."""
        return Model()

    # 3. Data. `count` samples, a tensor a column with a row a sample; real ones can be read from a file here.
    def columns(self, count, generator):
        """Return the samples, drawn with ``generator``; their "index" is added."""
        return {
            "x": torch.randn(count, 10, generator=generator),
            "y": torch.randint(4, (count,), generator=generator),
        }

    # 4. The loss of any set of samples: a scalar.
    def loss(self, outputs, batch):
        """Return the mean cross entropy."""
        return nn.functional.cross_entropy(outputs, batch["y"])

    # 5. The optimizer, and with `def scheduler(self, optimizer)` a schedule that steps once after each step.
    def optimizer(self, params):
        """Return SGD: it hides no gradient of a wrong scale, as Adam does."""
        return torch.optim.SGD(params, lr=0.1)
