"""A loss that couples the samples of a batch: who sees how many negatives is where dp, ddp and ddp2 differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch, Workload

TEMPERATURE = 0.5


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 8))

    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.normalize(self.layers(batch["views"]), dim=-1)


class Contrastive(Workload):
    """InfoNCE with in-batch negatives (van den Oord et al. 2018, arXiv:1807.03748, eq. 4), two views a sample."""

    name = "contrastive"
    exposes = "which batch the loss sees: all of it (none, dp), a node's (ddp2), a rank's (ddp)"

    def build(self) -> nn.Module:
        """Return an encoder 12 → 24 → 8 whose outputs have length one."""
        return _Encoder()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``views`` (2, 12): one point seen twice with noise."""
        point = torch.randn(count, 1, 12, generator=generator)
        return {"views": point + 0.3 * torch.randn(count, 2, 12, generator=generator)}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the cross entropy of finding a sample's second view among all second views of the batch."""
        first, second = outputs.unbind(1)
        similarity = first @ second.T / TEMPERATURE
        return nn.functional.cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device))
