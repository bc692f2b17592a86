"""Notes frozen weights that change, between optimizer steps or in one, and whether a product of others was added."""

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
from plumbline.check.rank.tensor_digest import digest_and_projection, readable_values, tensor_digest, weights_prints
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of

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
    """Return a digest of some entries, of all where that costs no more."""
    values = readable_values(one)
    if values is None or values.numel() <= SAMPLED or not values.is_contiguous():
        return tensor_digest(one)
    stride = values.numel() // SAMPLED | 1  # an odd one walks through all columns
    return tensor_digest(values.view(-1)[::stride][:SAMPLED])


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
