"""A workload, and torch's trainer for it: one file, given to ``--subject``, and to pytest's ``-p``."""

from __future__ import annotations

import torch
from torch import nn

from plumbline.subjects.torch_base import train as train
from plumbline.workloads import Workload, register


class _Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, batch):
        return self.layer(batch["x"])[:, 0]


class Regression(Workload):
    """Linear regression with a loss that is robust to outliers."""

    name = "regression"
    exposes = "what the built-in workloads expose"

    def build(self):
        return _Regression()

    def columns(self, count, generator):
        return {name: torch.randn(count, *shape, generator=generator) for name, shape in (("x", (6,)), ("y", ()))}

    def loss(self, outputs, batch):
        return nn.functional.smooth_l1_loss(outputs, batch["y"])


register(Regression())
