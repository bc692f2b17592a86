"""Gradients that hold only the rows which were looked up."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch, Workload

ROWS = 60
LENGTH = 4


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 8, sparse=True)
        self.head = nn.Linear(8, 6)

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.embedding(batch["words"]).mean(1).tanh())


class EmbeddingSparse(Workload):
    """Classifies bags of words; the embedding's gradient is sparse, and its rows are rare: ranks have few in common."""

    name = "embedding-sparse"
    exposes = "sparse gradients that are summed, overwritten or left out where dense ones are averaged"
    needs: ClassVar[frozenset[str]] = frozenset({"sparse-gradients"})
    gloo_only = "NCCL cannot all-reduce sparse gradients"
    narrow = True

    def build(self) -> nn.Module:
        """Return a mean of embeddings and a linear head."""
        return _Bag()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``words`` (4,), the frequent ones first in the vocabulary, and the class ``y``."""
        rare = torch.rand(count, LENGTH, generator=generator) ** 2
        return {"words": (ROWS * rare).long(), "y": torch.randint(6, (count,), generator=generator)}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy."""
        return nn.functional.cross_entropy(outputs, batch["y"])
