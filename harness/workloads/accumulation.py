"""Several micro-batches a step, and a last window that is shorter than the others."""

from __future__ import annotations

from typing import ClassVar

import torch

from harness.workloads.base import Batch
from harness.workloads.mlp import Mlp


class Accumulation(Mlp):
    """The perceptron with windows of three and two micro-batches; loud samples make micro-batches unlike."""

    name = "accumulation"
    exposes = "micro-batches summed, divided twice, wiped, left unreduced; the short last window dropped or misjudged"
    needs: ClassVar[frozenset[str]] = frozenset({"accumulation"})
    narrow = True
    accumulate = 3
    steps_per_epoch = 5

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), whose length differs widely by sample, and the class ``y``."""
        columns = super().columns(count, generator)
        loudness = torch.randn(count, 1, generator=generator).exp()
        return {**columns, "x": columns["x"] * loudness}
