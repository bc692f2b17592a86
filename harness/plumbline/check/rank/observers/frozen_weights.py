"""Notes frozen weights that change: between optimizer steps, or in one, and whether a product of others was added."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.tensor_digest import digest_and_projection, readable_values, tensor_digest
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of

MOST_PAIRS = 16
"""Pairs of matrices whose products are tried for a change of a frozen one: adapters are few, and lie near to it."""


class FrozenWeightObserver(Observer):
    """Notes of each step which frozen parameters of the called modules changed; of those on this rank as a whole.

    ``between``: those that changed since the last step of any optimizer, by name. Each has ``factor``, by which the
    change multiplied its values, and ``product``: the names of two trainable matrices and the factor of their product,
    which explains the change; None where there is none. ``within``: those that the step itself changed, each with
    ``gradient``: ``zero``, ``old`` if it is that of an earlier step, or ``own``.
    """

    name = "frozen-weights"

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._known: dict[int, tuple[weakref.ref[Tensor], str | None, list[float] | None]] = {}
        self._gradients: dict[int, str | None] = {}
        self._between: Facts = {}
        self._stepped: list[tuple[str, Tensor, str]] = []

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(known is module for known in self._modules):
            self._modules.append(module)

    def before_step(self, optimizer: Optimizer) -> None:
        self._between = {}
        own = {id(one) for one in parameters_of(optimizer)}
        self._stepped = []
        for module in self._modules:
            named = dict(module.named_parameters())
            for name, one in named.items():
                if one.requires_grad:
                    self._known.pop(id(one), None)
                    if id(one) in own:
                        self._gradients[id(one)] = None if one.grad is None else tensor_digest(one.grad)
                    continue
                if readable_values(one) is None:
                    continue
                if (change := self._change(name, one, named)) is not None:
                    self._between[name] = change
                if id(one) in own and one.grad is not None:
                    self._stepped.append((name, one, self._kind(one)))

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        within = {}
        for name, one, kind in self._stepped:
            before = self._known[id(one)][1]
            self._note(one)
            if self._known[id(one)][1] != before:
                within[name] = {"gradient": kind}
        between, self._between, self._stepped = self._between, {}, []
        return {"between": between, "within": within} if between or within else None

    def stop(self) -> None:
        self._modules = []
        self._known.clear()

    def _note(self, one: Tensor) -> None:
        self._known[id(one)] = weakref.ref(one), *digest_and_projection(one)

    def _kind(self, one: Tensor) -> str:
        if not bool(one.grad.any()):  # type: ignore[union-attr]
            return "zero"
        return "old" if self._gradients.get(id(one)) == tensor_digest(one.grad) else "own"  # type: ignore[arg-type]

    def _change(self, name: str, one: Tensor, named: Mapping[str, Tensor]) -> Facts | None:
        """Return how a frozen parameter has changed since it was last seen, None if it has not."""
        ref, digest, projection = self._known.get(id(one), (None, None, None))
        if ref is None or ref() is not one:
            self._note(one)
            return None
        if tensor_digest(one) == digest:
            return None
        self._note(one)
        now = self._known[id(one)][2]
        if projection is None or now is None:
            return {"factor": None, "product": None}
        before, after = (torch.tensor(each, dtype=torch.float64) for each in (projection, now))
        eps = torch.finfo(one.dtype).eps if one.dtype.is_floating_point else 0.0
        noise = 8 * eps * float(before.norm() + after.norm())
        factor = _multiple(after, before, noise)
        return {"factor": factor, "product": None if factor else _product(name, one, named, after - before, noise)}


def _multiple(vector: Tensor, of: Tensor, noise: float) -> float | None:
    """Return the factor if one vector is a multiple of another one, up to noise."""
    square = float(of @ of)
    if not square:
        return None
    factor = float(vector @ of) / square
    return factor if float((vector - factor * of).norm()) <= noise < abs(factor) * square**0.5 else None


def _product(name: str, one: Tensor, named: Mapping[str, Tensor], change: Tensor, noise: float) -> list[object] | None:
    """Return which two trainable matrices' product, multiplied by which factor, is a change of a frozen one."""
    if one.dim() != 2:
        return None
    for left, right in _pairs(name, one, named):
        product = named[left].detach().double() @ named[right].detach().double()
        for made in (product, product.mT):
            if made.shape == one.shape:
                projection = digest_and_projection(made.contiguous())[1]
                factor = projection and _multiple(change, torch.tensor(projection, dtype=torch.float64), noise)
                if factor:
                    return [left, right, factor]
    return None


def _pairs(name: str, one: Tensor, named: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return the names of near trainable matrices, in two levels of modules, whose product has a frozen one's shape."""
    own = name.rpartition(".")[0]
    shapes = (tuple(one.shape), tuple(one.shape)[::-1])
    for place in (own, own.rpartition(".")[0]):
        near = [each for each, other in named.items() if each.startswith(f"{place}.") or not place]
        near = [each for each in near if named[each].requires_grad and named[each].dim() == 2]
        found = [
            (left, right)
            for left, right in permutations(near, 2)
            if named[left].shape[1] == named[right].shape[0] and (named[left].shape[0], named[right].shape[1]) in shapes
        ]
        if found:
            return found[:MOST_PAIRS]
    return []
