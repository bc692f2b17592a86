"""Layers and losses that depend on the whole batch: BatchNorm, a contrastive loss, and means over tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.basics import Plain
from plumbline.workloads.dataset import Batch


class _Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(8, 4)

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.features(batch["image"]).mean((2, 3)))


class CnnBatchNorm(Plain):
    """A small convolutional net with BatchNorm, trained with momentum."""

    name = "cnn-batchnorm"
    exposes = "statistics per replica (deviates by contract), buffers, an optimizer that has a state"
    network: ClassVar[type[nn.Module]] = _Cnn
    stepped_by = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
    blocks = 7

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``image`` (1, 6, 6), whose brightness and contrast differ between samples, and the class ``y``."""
        contrast = 0.5 + torch.rand(count, 1, 1, 1, generator=generator)
        brightness = torch.randn(count, 1, 1, 1, generator=generator)
        image = torch.randn(count, 1, 6, 6, generator=generator) * contrast + brightness
        return {"image": image, "y": torch.randint(4, (count,), generator=generator)}


TEMPERATURE = 0.5


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 8))

    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.normalize(self.layers(batch["views"]), dim=-1)


class Contrastive(Plain):
    """InfoNCE with in-batch negatives (van den Oord et al. 2018, arXiv:1807.03748, eq. 4) and two views per sample."""

    name = "contrastive"
    exposes = "which batch the loss sees: all of it (none, dp), a node's (ddp2), a rank's (ddp)"
    network: ClassVar[type[nn.Module]] = _Encoder
    blocks = 3

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``views`` (2, 12): one point, twice, with different noise."""
        point = torch.randn(count, 1, 12, generator=generator)
        return {"views": point + 0.3 * torch.randn(count, 2, 12, generator=generator)}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the cross entropy of identifying a sample's second view among all second views of the batch."""
        first, second = outputs.unbind(1)
        similarity = first @ second.T / TEMPERATURE
        return nn.functional.cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device))


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
        # A causal summary of the tokens so far: their running mean.
        past = now.cumsum(1) / torch.arange(1, LENGTH + 1, device=now.device, dtype=now.dtype)[:, None]
        return self.head(torch.tanh(self.mix(torch.cat((now, past), -1))))


class LmTokens(Plain):
    """Next-token prediction with padding; the loss is divided by the number of real tokens in the batch."""

    name = "lm-tokens"
    exposes = "token means taken per rank or per micro-batch, division by the padded length"
    network: ClassVar[type[nn.Module]] = _LanguageModel
    blocks = 3
    sequence = LENGTH
    mean_over_labels = True

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``tokens`` (length + 1,), and ``real`` and ``labels`` (length,).

        ``real`` is 1 where there is a token to predict. ``labels`` has that token there, and -100 elsewhere.
        """
        tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
        # Squared, so that many samples are short and shards differ in their number of tokens.
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
    precisions = ("32", "bf16-true")
    accumulate = 2
    steps_per_epoch = 5
