"""Workloads of a user's own, in files; what a test registers is gone after it."""

from __future__ import annotations

import pytest

from harness.workloads import WORKLOADS

GOOD = """
import torch
from torch import nn

from harness.workloads import Workload


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
"""


@pytest.fixture(autouse=True)
def _registered():
    before = dict(WORKLOADS)
    yield
    WORKLOADS.clear()
    WORKLOADS.update(before)


@pytest.fixture
def written(tmp_path):
    """Write a file with a right workload; ``changes`` are replacements in it, ``more`` is added to its class."""

    def write(name="mine.py", changes=(), more=""):
        text = GOOD
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        lines = "".join(f"    {line}\n" if line else "\n" for line in more.strip("\n").splitlines())
        (tmp_path / name).write_text(f"{text}\n{lines}")
        return tmp_path / name

    return write
