"""Sparse gradients, nested outputs, and tied weights."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.basics import Mlp, Plain
from plumbline.workloads.dataset import Batch

ROWS = 60
WORDS = 4


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 8, sparse=True)
        self.head = nn.Linear(8, 6)

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.embedding(batch["words"]).mean(1).tanh())


class EmbeddingSparse(Plain):
    """Classifies bags of words. The embedding's gradient is sparse, and ranks have few rows in common."""

    name = "embedding-sparse"
    exposes = "sparse gradients that are summed, overwritten or left out where dense ones are averaged"
    network: ClassVar[type[nn.Module]] = _Bag
    blocks = 2
    needs: ClassVar[frozenset[str]] = frozenset({"sparse-gradients"})
    gloo_only = "all-reduce sparse gradients"
    narrow = True

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``words`` (4,), lower numbers being more frequent, and the class ``y``."""
        rare = torch.rand(count, WORDS, generator=generator) ** 2
        return {"words": (ROWS * rare).long(), "y": torch.randint(6, (count,), generator=generator)}


class _Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.aside = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 3)

    def forward(self, batch: Batch) -> dict[str, Any]:
        hidden = self.trunk(batch["x"]).tanh()
        length = self.trunk.weight.square().mean()
        return {"logits": self.head(hidden), "rest": (hidden, (self.aside(hidden), length))}


class NestedOutputs(Mlp):
    """The perceptron with a second head and a weight penalty, which the model returns as a 0-d tensor.

    Gathered from several devices, the penalty is a vector with one entry per device, and the loss takes its mean.
    """

    name = "nested-outputs"
    exposes = "outputs gathered in part, without a gradient, or in another order; scalars that get lost or are summed"
    network: ClassVar[type[nn.Module]] = _Several
    blocks = 2
    whole_layers = "its penalty reads a layer's weights beside the layer's forward"
    needs: ClassVar[frozenset[str]] = frozenset({"nested-outputs"})
    narrow = True

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        hidden, (aside, length) = outputs["rest"]
        # Autocast computes mse_loss in float32. In float16 the scaled gradient of a plain mean is out of range.
        small = sum(nn.functional.mse_loss(output, torch.zeros_like(output)) for output in (hidden, aside))
        return nn.functional.cross_entropy(outputs["logits"], batch["y"]) + 0.1 * small + 0.5 * length.mean()


VOCABULARY = 20
LENGTH = 8
WIDTH = 16
HEADS = 2


class _Attention(nn.Module):
    """Attention with separate layers for queries, keys and values. The gradient of the keys' bias is therefore zero."""

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


class Transformer(Plain):
    """Next-token prediction by one pre-norm block (Radford et al. 2019) on samples of equal length."""

    name = "transformer"
    exposes = "tied weights counted twice, averaged twice or untied; a gradient that is zero by construction accused"
    network: ClassVar[type[nn.Module]] = _Transformer
    blocks = 5
    sequence = LENGTH
    heads = HEADS
    narrow = True
    precisions: ClassVar[tuple[str, ...]] = ("32", "16", "bf16-true")
    couples_stages = True
    batch_size = 12

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``tokens`` (length + 1,)."""
        return {"tokens": torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["tokens"][:, 1:].flatten())


class ClippingTied(Transformer):
    """The transformer with gradients clipped to a norm that only the gradients of the first steps exceed."""

    name = "clipping-tied"
    exposes = "a norm that counts tied weights twice, or is that of a part of the model; steps clipped that are short"
    needs: ClassVar[frozenset[str]] = frozenset({"clipping"})
    precisions = ("32",)
    clip_norm = 3.0
