"""A step so small that the trainer's overhead takes most of its time."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.dataset import Batch
from plumbline.workloads.performance.performance_workload import PerformanceWorkload, ProblemSize


class _SmallPerceptron(nn.Module):
    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, batch: Batch) -> Tensor:
        outputs: Tensor = self.layers(batch["x"])
        return outputs


class SmallSteps(PerformanceWorkload):
    """A perceptron of 19 thousand parameters and few samples: at most a millisecond of arithmetic anywhere."""

    name = "perf-mlp"
    dominated_by = "overhead: the arithmetic of a step takes less than the calls that ask for it"
    sizes: ClassVar[dict[str, ProblemSize]] = {
        "cpu": ProblemSize({"inputs": 64, "width": 256, "classes": 8}, batch=4, steps=80),
        "cuda": ProblemSize({"inputs": 64, "width": 256, "classes": 8}, batch=4, steps=200, warmup=10),
    }

    def build(self) -> nn.Module:
        return _SmallPerceptron(**self.size.model)

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (inputs,) and the class ``y``."""
        size = self.size.model
        return {
            "x": torch.randn(count, size["inputs"], generator=generator),
            "y": torch.randint(size["classes"], (count,), generator=generator),
        }
