"""Notes frozen weights that change, whether a product of others was added, and 16-bit weights that steps change."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.low_rank import factor_pairs
from plumbline.check.rank.optimizer.optimizer_replay import groups_of, is_of_torch, stepping
from plumbline.check.rank.tensor_digest import (
    digest_and_projection,
    readable_values,
    sampled,
    tensor_digest,
    weights_prints,
)
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.sharding import local

MOST_ENTRIES = 2**26
"""Entries of the largest frozen matrix for which products are computed, in float64: 512 MiB."""

MARGIN = 8
"""The direction of a change is known if the change is this many times as long as its rounding. Another product then
fits by chance once in a million times (8 numbers, 1/8 of the length each)."""


SAMPLED = 1024
"""Entries that are compared at each step. The others are compared when recording ends: what changes a weight changes
most of its entries."""


@dataclass(frozen=True, eq=False)
class _Seen:
    """A frozen weight when it was last seen: digests of some entries and of all, and a projection of all."""

    ref: weakref.ref[Tensor]
    name: str
    sampled: str | None
    digest: str | None
    projection: list[float] | None

    @staticmethod
    def of(name: str, one: Tensor) -> _Seen:
        return _Seen(weakref.ref(one), name, _sampled(one), *digest_and_projection(one))


class FrozenWeightObserver(Observer):
    """Notes for each step which frozen parameters of the called modules changed, if they lie on this rank as a whole.

    ``between``: the parameters that changed since the last step of any optimizer, by name. Each has ``factor``, by
    which the change multiplied its values, and ``product``, the names of two trainable matrices and the factor of their
    product that explains the change; both are None if they do not explain it. ``within``: the parameters that the step
    itself changed, each with ``gradient``: ``zero``, ``old`` if it is the gradient of an earlier step, or ``own``.

    Facts of the process: ``unnoticed``, the names of parameters whose change was seen at no step.
    """

    name = "frozen-weights"

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._known: dict[int, _Seen] = {}
        self._unnoticed: list[str] = []
        self._gradients: dict[int, int] = {}
        self._between: Facts = {}
        self._stepped: list[tuple[str, Tensor, str]] = []

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(known is module for known in self._modules):
            self._modules.append(module)

    def before_step(self, optimizer: Optimizer) -> None:
        self._between = {}
        own = {id(one) for one in parameters_of(optimizer)}
        self._stepped = []
        trained: dict[int, Tensor] = {}
        for module in self._modules:
            named = dict(module.named_parameters())
            for name, one in named.items():
                if one.requires_grad:
                    self._known.pop(id(one), None)
                    if id(one) in own and one.grad is not None:
                        trained[id(one)] = one.grad
                    continue
                if readable_values(one) is None:
                    continue
                is_stepped = id(one) in own and one.grad is not None
                if (change := self._change(name, one, named, is_stepped=is_stepped)) is not None:
                    self._between[name] = change
                if is_stepped:
                    self._stepped.append((name, one, self._kind(one)))
        self._gradients.update(zip(trained, weights_prints(list(trained.values())), strict=True))

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        within = {}
        for name, one, kind in self._stepped:
            before = self._known[id(one)].digest
            self._known[id(one)] = _Seen.of(name, one)
            if self._known[id(one)].digest != before:
                within[name] = {"gradient": kind}
        between, self._between, self._stepped = self._between, {}, []
        return {"between": between, "within": within} if between or within else None

    def stop(self) -> None:
        seen = [(known, one) for known in self._known.values() if (one := known.ref()) is not None]
        changed = [known.name for known, one in seen if not one.requires_grad and tensor_digest(one) != known.digest]
        self._unnoticed += [name for name in changed if name not in self._unnoticed]
        self._modules = []
        self._known.clear()

    def final_facts(self) -> Facts | None:
        return {"unnoticed": self._unnoticed} if self._unnoticed else None

    def _kind(self, one: Tensor) -> str:
        if not bool(one.grad.any()):  # type: ignore[union-attr]
            return "zero"
        (now,) = weights_prints([one.grad])  # type: ignore[list-item]
        return "old" if now and self._gradients.get(id(one)) == now else "own"

    def _change(self, name: str, one: Tensor, named: Mapping[str, Tensor], *, is_stepped: bool) -> Facts | None:
        """Return how a frozen parameter has changed since it was last seen, None if it has not."""
        seen = self._known.get(id(one))
        if seen is None or seen.ref() is not one:
            self._known[id(one)] = _Seen.of(name, one)
            return None
        if _sampled(one) == seen.sampled and not (is_stepped and tensor_digest(one) != seen.digest):
            return None
        now = self._known[id(one)] = _Seen.of(name, one)
        if seen.projection is None or now.projection is None:
            return {"factor": None, "product": None}
        before, after = (torch.tensor(each, dtype=torch.float64) for each in (seen.projection, now.projection))
        change = after - before
        eps = torch.finfo(one.dtype).eps if one.dtype.is_floating_point else 0.0
        # What is added may be rounded twice, the sum once, by half an eps each. Projected lengths err by a factor of 2.
        noise = eps * float(after.norm() + 2 * change.norm())
        product = _product(name, one, named, change, noise)
        factor = None if product else _multiple(after, before, noise)
        if factor is not None and abs(factor - 1) * float(before.norm()) <= noise:
            factor = None
        return {"factor": factor, "product": product}


def _sampled(one: Tensor) -> str | None:
    values = readable_values(one)
    return None if values is None else tensor_digest(sampled(values, SAMPLED))


def _multiple(vector: Tensor, of: Tensor, noise: float) -> float | None:
    """Return the factor if one vector is a multiple of another one, up to noise."""
    square = float(of @ of)
    if not square:
        return None
    factor = float(vector @ of) / square
    return factor if float((vector - factor * of).norm()) <= noise else None


def _product(name: str, one: Tensor, named: Mapping[str, Tensor], change: Tensor, noise: float) -> list[object] | None:
    """Return two trainable matrices and a factor whose product is the change of a frozen matrix, or None."""
    if one.numel() > MOST_ENTRIES or float(change.norm()) <= MARGIN * noise:
        return None
    for left, right in factor_pairs(name, {each: (tuple(p.shape), p.requires_grad) for each, p in named.items()}):
        product = named[left].detach().double() @ named[right].detach().double()
        for made in (product, product.mT):
            if made.shape == one.shape:
                projection = digest_and_projection(made.contiguous())[1]
                factor = projection and _multiple(change, torch.tensor(projection, dtype=torch.float64), noise)
                if factor:
                    return [left, right, factor]
    return None


_DTYPES = (torch.bfloat16, torch.float16)


_DECOUPLED = tuple(kind for name in ("AdamW", "Muon") if (kind := getattr(torch.optim, name, None)) is not None)
"""Optimizers of torch whose weight decay is a step of its own."""


class MovedWeightObserver(Observer):
    """Notes for each step ``due`` and ``moved``: how many 16-bit entries have a gradient, and how many of them changed.

    ``decays`` and ``decayed``: how many nonzero entries torch's optimizers multiply by one minus the weight decay, and
    how many of these products are not rounded to the same number. Memory: a copy of the weights in 16 bits.
    """

    name = "moved-weights"

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._decays = (0, 0)

    def before_step(self, optimizer: Optimizer) -> None:
        """Keep the weights that have a gradient, and where it is not zero."""
        given = [
            (one, local(one.grad))
            for one in parameters_of(optimizer)
            if one.dtype in _DTYPES and one.grad is not None and one.grad.layout is torch.strided
        ]
        self._before = [
            (one, local(one.detach()).clone(), gradient != 0)
            for one, gradient in given
            if gradient.shape == local(one).shape
        ]
        self._decays = _decays(optimizer)

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        kept, self._before = self._before, []
        if not kept or skipped:
            return None
        moved = sum(int(((local(one.detach()) != before) & has).sum()) for one, before, has in kept)
        decays, decayed = self._decays
        due = sum(int(has.sum()) for _, _, has in kept)
        return {"due": due, "moved": moved, "decays": decays, "decayed": decayed}

    def stop(self) -> None:
        self._before = []


def _decays(optimizer: Optimizer) -> tuple[int, int]:
    """Return how many nonzero 16-bit entries have a decoupled weight decay, and how many of them it changes.

    Only torch's own optimizers are followed: others may keep the weights in float32. A fused step rounds only once,
    after the update.
    """
    decays = decayed = 0
    own = stepping(optimizer)
    for group in groups_of(optimizer) if is_of_torch(own) else ():
        is_decoupled = isinstance(own, _DECOUPLED) or group.get("decoupled_weight_decay")
        if not is_decoupled or group.get("fused") or not (decay := group["lr"] * group.get("weight_decay", 0)):
            continue
        factor = 1 - decay
        for one in (local(each.detach()) for each in group["params"] if each.grad is not None):
            if one.dtype in _DTYPES:
                decays += int(one.count_nonzero())
                decayed += int((one * factor != one).sum())
    return decays, decayed
