"""A right sequence-parallel trainer: each rank has the whole model, and a part of every sample's sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mesh_trainer import GatheredForOwnUse, MeshTrainer, part, summed
from torch.nn.functional import cross_entropy


class SequenceParallel(MeshTrainer):
    """Divides the loss of its own tokens by the number of all tokens, and sums gradients over the ranks.

    Supports the language model of ``lm-tokens`` and the transformer. ``along`` is the mesh dimension.
    """

    along = "sp"

    def divide(self, model):
        model.forward = self.transformer if hasattr(model, "attention") else self.running_mean

    @property
    def places(self):
        """The places of this rank's tokens in the sequence."""
        return part(self.all_places, 0, self.group(self.along))

    def compute(self, batch):
        self.length = batch["tokens"].shape[1] - 1
        self.all_places = torch.arange(self.length)
        return self.wrapped(batch)

    def numbers(self):
        """Return the positions that the model embeds for this rank's tokens."""
        return self.places

    def gathered(self, x):
        """Return the activations of all tokens: samples × tokens × width."""
        return GatheredForOwnUse.apply(x, 1, self.group(self.along), self.length)

    def running_mean(self, batch):
        model, own = self.model, self.places
        now = model.embedding(batch["tokens"][:, own])
        before = self.gathered(now).cumsum(1)[:, own]
        past = before / (1 + self.numbers()[:, None]).to(now.dtype)
        return model.head(torch.tanh(model.mix(torch.cat((now, past), -1))))

    def transformer(self, batch):
        model, own = self.model, self.places
        x = model.tokens(batch["tokens"][:, own]) + model.places(self.numbers())
        x = x + self.attention(model.attention, model.norm_1(x))
        x = x + model.feed(model.norm_2(x))
        return model.head(model.norm_3(x))

    def attention(self, layer, x):
        heads = (2, x.shape[-1] // 2)
        query = layer.query(x).unflatten(-1, heads).transpose(1, 2)
        key, value = (self.gathered(one(x)).unflatten(-1, heads).transpose(1, 2) for one in (layer.key, layer.value))
        later = self.all_places[None, :] > self.places[:, None]
        scores = (query @ key.mT / heads[1] ** 0.5).masked_fill(later, -torch.inf)
        return layer.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))

    def loss(self, outputs, batch):
        targets = batch["tokens"][:, 1 + self.places]
        counted = batch["real"][:, self.places] if "real" in batch else torch.ones_like(targets)
        losses = cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * counted.flatten()).sum() / self.count(counted.sum())

    def count(self, own):
        """Return the divisor of this rank's summed losses: the number of all ranks' tokens."""
        total = own.clone()
        dist.all_reduce(total, group=self.group(self.along))
        return total

    def synchronize(self):
        for gradient in self.gradients().values():
            dist.all_reduce(gradient, group=self.group(self.along))


class GatheredFromPlaces(torch.autograd.Function):
    """Puts all ranks' tokens at their places in the sequence; the backward sums the ranks' gradients."""

    @staticmethod
    def forward(context, x, places, group, length):
        context.places, context.group = places, group
        whole = x.new_zeros(x.shape[0], length, *x.shape[2:])
        whole[:, places] = x.detach()
        return summed(whole, group)

    @staticmethod
    def backward(context, gradient):
        return summed(gradient, context.group)[:, context.places], None, None, None


class ContextParallel(SequenceParallel):
    """Sequence parallelism where each rank has an early and a late piece of each sequence."""

    along = "cp"

    @property
    def pieces(self):
        """The places of this rank's two pieces."""
        group = self.group(self.along)
        every = self.all_places.tensor_split(2 * group.size())
        return every[group.rank()], every[-1 - group.rank()]

    @property
    def places(self):
        return torch.cat(self.pieces)

    def gathered(self, x):
        return GatheredFromPlaces.apply(x, self.places, self.group(self.along), self.length)
