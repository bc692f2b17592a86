"""A mixture of experts: a trained router chooses the layers that each sample uses."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.accumulation import Accumulation
from plumbline.workloads.basics import Mlp
from plumbline.workloads.dataset import Batch
from plumbline.workloads.updates import Clipping

WIDTH = 16
EXPERTS = 4


class Experts(nn.ModuleList):
    """Expert layers with the same input. Trainers that distribute experts over ranks replace this module."""

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return the sum of all experts' outputs for ``x`` (rows, width), weighted by ``gates`` (rows, experts).

        An expert computes only the rows for which its gate is not zero.
        """
        total = torch.zeros_like(x, dtype=gates.dtype)
        for number, expert in enumerate(self):
            rows = gates[:, number].nonzero().flatten()
            weighted = gates[rows, number, None] * expert(x[rows])
            total = total.index_add(0, rows, weighted.to(total.dtype))
        return total


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(16, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.first(batch["x"]).tanh()
        # Squared ReLU gates (Wang et al. 2024, arXiv:2412.14711): if rounding opens or closes a gate, neither the
        # output nor the gradient jumps, as they would with top-k routing.
        gates = self.router(hidden).relu().square()
        return self.head(hidden + self.experts(hidden, gates))


class MixtureOfExperts(Mlp):
    """The perceptron with four experts and a router between its layers."""

    name = "experts"
    exposes = "gradients of experts or of their router counted twice, divided once too often, or missing"
    network: ClassVar[type[nn.Module]] = _Mixture
    blocks = 2
    experts = EXPERTS
    narrow = True
    precisions: ClassVar[tuple[str, ...]] = ("64", "32", "bf16", "bf16-true")


class ClippingExperts(MixtureOfExperts, Clipping):
    """The mixture of experts with gradients clipped to a fraction of their norm."""

    name = "clipping-experts"
    exposes = "norms without experts, with those of some ranks only, or averaged over ranks"
    precisions: ClassVar[tuple[str, ...]] = ("64", "32", "bf16")
    couples_stages = False


class AccumulationExperts(MixtureOfExperts, Accumulation):
    """The mixture of experts with windows of three and two micro-batches."""

    name = "accumulation-experts"
    exposes = "experts divided by another number of micro-batches than the rest, or reduced for the last one alone"
    precisions: ClassVar[tuple[str, ...]] = ("32", "bf16", "bf16-true")
    couples_stages = False
