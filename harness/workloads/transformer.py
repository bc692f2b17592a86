"""A small causal transformer: attention, LayerNorm, and one matrix that is both embedding and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch, Workload

VOCABULARY = 20
LENGTH = 8
WIDTH = 16
HEADS = 2


class _Attention(nn.Module):
    """Queries, keys and values have a layer each: the keys' bias then has a gradient of its own, which is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        scores = (query @ key.mT / split[-1] ** 0.5).masked_fill(later, -torch.inf)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm_1, self.attention = nn.LayerNorm(WIDTH), _Attention()
        self.norm_2, self.feed = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)),
        )
        self.norm_3, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: Batch) -> Tensor:
        now = batch["tokens"][:, :-1]
        x = self.tokens(now) + self.places(torch.arange(LENGTH, device=now.device))
        x = x + self.attention(self.norm_1(x))
        x = x + self.feed(self.norm_2(x))
        return self.head(self.norm_3(x))


class Transformer(Workload):
    """Next-token prediction by one pre-norm block (Radford et al. 2019), all samples equally long."""

    name = "transformer"
    exposes = "tied weights counted twice, averaged twice or untied; a gradient that is zero by construction accused"
    narrow = True
    batch_size = 12

    def build(self) -> nn.Module:
        """Return the transformer; outputs are (batch, length, vocabulary)."""
        return _Transformer()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``tokens`` (length + 1,)."""
        return {"tokens": torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy of all tokens."""
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["tokens"][:, 1:].flatten())
