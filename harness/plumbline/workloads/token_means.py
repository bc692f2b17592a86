"""Losses that are means over tokens in samples of unequal length, where the mean of rank means is wrong."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.dataset import Batch
from plumbline.workloads.workload import Workload

VOCABULARY = 16
LENGTH = 10


class _LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.mix = nn.Linear(24, 24)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, batch: Batch) -> Tensor:
        now = self.embedding(batch["tokens"][:, :-1])
        # A causal summary of what came before: the running mean.
        past = now.cumsum(1) / torch.arange(1, LENGTH + 1, device=now.device, dtype=now.dtype)[:, None]
        outputs: Tensor = self.head(torch.tanh(self.mix(torch.cat((now, past), -1))))
        return outputs


class LmTokens(Workload):
    """Next-token prediction with padding; the loss is divided by the number of real tokens in the batch."""

    name = "lm-tokens"
    exposes = "token means taken per rank or per micro-batch, division by the padded length"
    blocks = 3
    sequence = LENGTH
    mean_over_labels = True

    def build(self) -> nn.Module:
        """Return embedding, a causal mixing layer, a head; outputs are (batch, length, vocabulary)."""
        return _LanguageModel()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``tokens`` (length + 1,), and ``real`` and ``labels`` (length,).

        ``real`` is 1 where there is a token to predict. There ``labels`` has that token, and -100 elsewhere.
        """
        tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
        # Squared, so that short samples are many and shards differ in their number of tokens.
        lengths = 1 + (LENGTH * torch.rand(count, generator=generator) ** 2).long()
        real = torch.arange(LENGTH) < lengths[:, None]
        return {"tokens": tokens, "real": real, "labels": tokens[:, 1:].where(real, -100)}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the summed cross entropy of the real tokens divided by their number."""
        losses = nn.functional.cross_entropy(outputs.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none")
        real = batch["real"].flatten()
        return (losses * real).sum() / real.sum()


class AccumulationTokens(LmTokens):
    """Next-token prediction with windows of two, two and one micro-batches, each with its own number of tokens."""

    name = "accumulation-tokens"
    exposes = "a token count of the wrong scope under accumulation: passed and not used, or divided by a second time"
    needs: ClassVar[frozenset[str]] = frozenset({"accumulation"})
    narrow = True
    precisions = ("32",)
    accumulate = 2
    steps_per_epoch = 5
