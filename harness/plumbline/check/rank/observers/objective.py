"""Notes the weight of each loss term in the gradient: the objective that is actually optimised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.loss_functions import ELEMENTS, FOLLOWED, LossCall, describe
from plumbline.check.rank.observers.loss_terms import (
    LossTerms,
    hides_a_mask,
    mean_weights,
    rows_among,
    samples_in,
    weights_of,
)
from plumbline.check.rank.observers.row_hashes import digest, row_hashes
from plumbline.check.rank.observers.unused_losses import held_losses
from plumbline.recording.backward_passes import is_number
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import ParameterNames
from plumbline.recording.patching import attempt, wrap
from plumbline.recording.pause import is_paused, is_rehearsal

_LONGEST_CHAIN = 64


@dataclass(eq=False)
class _Call:
    """A call of a loss function, and the gradient of the objective with respect to its result.

    ``is_masked``: a mask may set some entries of its input, which are terms nevertheless. ``arrived`` has the gradient.
    The hook that fills it must not hold the node, which would otherwise never be freed.
    """

    call: LossCall
    node: Any = None
    is_masked: bool = False
    arrived: list[Tensor] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)

    @property
    def cotangent(self) -> Tensor | None:
        return self.arrived[-1] if self.arrived else None


class ObjectiveObserver(Observer):
    """Notes the loss calls of each backward pass: ``{"calls": [...], "alone": ...}``.

    A call has its function, its reduction, the number of its terms, ``weight``, the sum of their weights in the pass (1
    for a mean that is not scaled), ``even``, whether the weights are equal, and ``own``, what ``weights_of`` returns
    for the terms whose weight is not zero. ``alone``: the differentiated loss is one call's result times a constant.
    ``means``: the weights of the means that add up to the loss, whatever computes them; see ``mean_weights``.
    ``terms``: all terms of the loss, as ``LossTerm`` describes them, None if the graph is not a sum of numbers.

    Schedules of pipelines run several forwards before the first backward pass, and two models may compute their losses
    before either is differentiated. So a call waits for its gradient until a later call has one, until a second pass
    uses no call at all, or until an optimizer steps.
    """

    name = "objective"

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self._depth = 0
        self._calls: list[_Call] = []
        self._waiting: list[_Call] = []
        self._root: Any = None
        self._means: list[list[float]] | None = None
        self._terms: LossTerms | None = None
        self._rows: int | None = None

    def install(self) -> None:
        """Wrap the loss functions, and the TorchScript compiler, which must not see these wrappers."""
        originals = {name: getattr(functional, name) for name in FOLLOWED}
        for name in originals:
            wrap(functional, name, self._around_loss)
        wrapped = {name: getattr(functional, name) for name in originals}
        wrap(torch.jit, "script", partial(_script_without, originals, wrapped))

    @property
    def calls(self) -> list[_Call]:
        """The calls of loss functions since the last backward pass."""
        return self._calls

    def stop(self) -> None:
        super().stop()
        self._root, self._means, self._terms = None, None, None
        self._calls, self._waiting = [], []

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_rehearsal():
            self._rows = attempt(samples_in, module, args, kwargs)

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Read the loss terms and the weights of means from the graph while it exists."""
        pending = [*self._waiting, *self._calls]
        if len(roots) == 1 and is_number(roots[0]):
            self._root = roots[0].grad_fn
            self._means = attempt(mean_weights, self._root)
            calls = {id(one.node): one.call.function for one in pending}
            names = {id(node): name for name, node in held_losses(self._names.roots) if node is not None}
            for one in pending:
                one.is_masked = one.call.function in ELEMENTS and attempt(hides_a_mask, one.node) is not False
            self._terms = attempt(LossTerms, self._root, calls, names, self._rows)

    def backward_ends(self, number: int) -> Facts | None:
        """Return the calls at whose results a gradient arrived in this pass."""
        new, self._calls = self._calls, []
        calls = [*self._waiting, *new]
        used = [one for one in calls if one.cotangent is not None]
        self._waiting = self._still_waiting(calls) if used or self._root is None else new
        alone = len(used) == 1 and _is_multiple(self._root, used[0].node)
        means, self._root, self._means = self._means, None, None
        terms, self._terms = self._terms, None
        if terms is not None:
            terms.remove()
        facts = [made for one in used if (made := attempt(_facts, one, self._rows)) is not None]
        if not facts and means is None and terms is None:
            return None
        return {
            "calls": facts,
            "alone": alone,
            "means": means,
            "terms": None if terms is None else [one.facts for one in terms.terms],
        }

    def _still_waiting(self, calls: Sequence[_Call]) -> list[_Call]:
        """Return the calls whose losses may be differentiated next. Others, such as losses for a log, hold memory."""
        if self._root is None:  # a pass that begins at activations
            return [one for one in calls if one.cotangent is None]
        last = max(place for place, one in enumerate(calls) if one.cotangent is not None)
        return list(calls[last + 1 :])

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """Drop the calls whose results no backward pass has used."""
        self._waiting = [one for one in self._waiting if one.cotangent is not None]
        return None

    def _around_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Asked first: a compiled region must not depend on what is being recorded.
        if torch.compiler.is_compiling() or not self.attends or is_rehearsal():
            return original(*args, **kwargs)
        self._depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self._depth -= 1
        if not self._depth:
            attempt(self._follow, original, args, kwargs, result)
        return result

    def _follow(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if type(result) is not Tensor or not result.requires_grad or not torch.is_grad_enabled():
            return
        one = _Call(describe(original.__name__, original, args, kwargs), result.grad_fn)
        # On the result itself: a division of it in place must not lose the hook.
        result.register_hook(partial(_arrives, one.arrived))  # type: ignore[no-untyped-call]
        self._calls.append(one)


def _arrives(arrived: list[Tensor], cotangent: Tensor | None) -> None:
    if cotangent is not None and not is_paused():  # None where what was computed from it is not used
        arrived.append(cotangent.detach())


def _facts(one: _Call, rows: int | None) -> Facts:
    call, cotangent = one.call, one.cotangent
    assert cotangent is not None
    weights = cotangent.double()
    if weights.dim() and call.counted is not None and call.counted.shape == weights.shape:
        weights = weights[call.counted]
    # In a sum, each term has the weight of the result.
    terms = call.terms if call.reduction == "sum" else 1.0
    return {
        "function": call.function,
        "reduction": call.reduction,
        "terms": call.terms,
        "weight": _finite(float(weights.sum() * terms)),
        "even": weights.numel() == 0 or bool((weights == weights.reshape(-1)[0]).all()),
        "targets": _digest(call.targets),
        "own": {**_own_weights(call, cotangent.double(), rows), "sure": not one.is_masked},
        "dtype": str(cotangent.dtype).partition(".")[2],
    }


def _own_weights(call: LossCall, cotangent: Tensor, rows: int | None) -> Facts:
    """Return the weights of the terms. In an unreduced loss, terms with weight zero do not count."""
    if call.reduction == "none":
        own = rows_among(cotangent, rows)
        if call.counted is not None and call.counted.shape == cotangent.shape:
            cotangent = cotangent * call.counted
        weights = cotangent if own is None else cotangent.reshape(own, -1)
        return weights_of((weights != 0).double(), weights, own)
    own = rows_among(call.targets, rows)
    if call.counted is not None and call.terms == float(call.counted.sum()):
        counts = call.counted.double() if own is None else call.counted.double().reshape(own, -1).sum(1)
    elif call.counted is None and own is not None:
        counts = torch.full((own,), call.terms / own, dtype=torch.float64)
    else:
        counts, own = torch.tensor([call.terms]), None
    weights = counts * float(cotangent) / (1.0 if call.reduction == "sum" else max(call.terms, 1e-300))
    return weights_of(counts, weights, own, even=torch.ones_like(counts, dtype=torch.bool))


def _digest(targets: Tensor) -> str:
    return digest(row_hashes([targets.reshape(1, -1)]))


def _finite(number: float) -> float | None:
    return number if abs(number) < float("inf") else None


def _is_multiple(root: Any, node: Any) -> bool:
    for _ in range(_LONGEST_CHAIN):
        if root is None or root is node:
            return root is not None
        following = [other for other, _ in root.next_functions if other is not None]
        if len(following) != 1:
            return False
        root = following[0]
    return False


def _script_without(
    plain: dict[str, Any],
    wrapped: dict[str, Any],
    original: Callable[..., Any],
    *args: Any,
    _frames_up: int = 0,
    **kwargs: Any,
) -> Any:
    """Call the TorchScript compiler with torch's own loss functions in place while it reads a script."""
    for name, function in plain.items():
        setattr(functional, name, function)
    try:
        # Names in the script are looked up in the frame of the caller: this one and that of ``wrap`` lie in between.
        return original(*args, _frames_up=_frames_up + 2, **kwargs)
    finally:
        for name, function in wrapped.items():
            setattr(functional, name, function)
