"""A workload as a user writes one: nothing is wrong with it. Tests change it as text."""

import torch
from torch import nn

from plumbline.workloads import Workload


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, batch):
        return self.layers(batch["x"])


class Mine(Workload):
    name = "mine"
    exposes = "something"

    def build(self):
        return Model()

    def columns(self, count, generator):
        return {
            "x": torch.randn(count, 5, generator=generator),
            "y": torch.randint(3, (count,), generator=generator),
        }
