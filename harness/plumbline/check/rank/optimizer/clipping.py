"""Notes each clipping of gradients: of which parameters, to what norm, when, and by which factor it changed them."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.optimizer.loss_scale import LossScale
from plumbline.check.rank.optimizer.twin import norm_in_float64
from plumbline.recording.backward_passes import PassGradients
from plumbline.recording.observer import WrappingObserver
from plumbline.recording.parameters import parameters_of
from plumbline.recording.patching import wrap
from plumbline.recording.sharding import is_shard, local

ROUNDINGS = 8
"""A gradient's norm that changed by fewer roundings of its dtype than this counts as unchanged."""

SAME_FACTOR = 2.0**-9
"""Relative difference up to which the factors in the gradients of several optimizers count as equal. Chosen: the
rounding of bfloat16, because a factor may be known only from one bfloat16 gradient."""

_FUNCTIONS = {
    "clip_grad_norm_": "norm", "clip_grads_with_norm_": "norm", "_clip_grads_with_norm_": "norm",
    "clip_grad_value_": "value",
}  # fmt: skip

_NORMS = ("get_total_norm", "_get_total_norm")

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"


class ClippingObserver(WrappingObserver):
    """Wraps the clipping functions of torch.nn.utils, which the methods of Accelerate, Fabric and Lightning call.

    ``on_clipping`` is called with the parameters before their gradients change, ``on_clipped`` after that, and
    ``on_edited`` before a step whose gradients the script has changed itself.

    Facts of a step: ``of``: how many parameters had a gradient; ``roundings``: the relative size of a change that
    counts as rounding. ``by_hand``: None if the script itself did not change gradients between the last backward pass
    and the step, else the ``factor`` by which it multiplied all of them (None if they changed in another way);
    ``while_scaled``: the same before the GradScaler unscaled them. ``edited``: after clipping, some gradients changed
    differently from the others. ``empty``: how many calls since any optimizer's last step got an empty generator.
    ``calls``: the calls since the optimizer's last step, each with
    ``kind`` (``norm`` or ``value``), ``limit``, ``norm_type`` and ``returned``, the norm that the call returned or was
    given; ``given``: the script passed a norm that it had not computed by ``get_total_norm`` of all gradients;
    ``pass``: the number of the latest backward pass at that time, and ``inside``: whether it was still running;
    ``covered``: how many of the optimizer's parameters were clipped;
    ``norm`` and ``others``: 2-norms, computed in float64, of the gradients that this rank holds: of the optimizer's
    parameters, and of other parameters in the same call; ``factor``: the factor by which ``norm`` changed;
    ``scale``: the loss scale that was still in the gradients;
    ``late``: every optimizer of these parameters had stepped already;
    ``kept``: the next backward pass added to the clipped gradients;
    ``sharded``: the gradients are shards.
    ``missed``: such calls that changed nothing, because they were given something else (``instead``).
    """

    name = "clipping"

    def __init__(self, loss_scale: LossScale) -> None:
        super().__init__()
        self.on_clipping: Callable[[Sequence[Tensor]], None] = lambda parameters: None
        self.on_clipped: Callable[[Sequence[Tensor]], None] = lambda parameters: None
        self.on_edited: Callable[[], None] = lambda: None
        self._loss_scale = loss_scale
        loss_scale.on_unscaling = self._is_unscaled
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._calls: dict[int, list[ClippingCall]] = {}
        self._lengths: dict[int, float] = {}
        self._passes: dict[int, int] = {}
        self._before_pass = PassGradients()
        self._pass = -1
        self._inside = False
        self._depth = 0
        self._changes: dict[int, Facts] = {}
        self._while_scaled: dict[int, Facts] = {}
        self._empty = 0
        self._wrapped_fsdp = False
        self._measured: Norm | None = None

    def install(self) -> None:
        """Wrap the functions before a script imports them by name."""
        for module in (torch.nn.utils.clip_grad, torch.nn.utils):
            for name, kind in _FUNCTIONS.items():
                wrap(module, name, self._around(kind))
            for name in _NORMS:
                wrap(module, name, self._around_norm)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)

    def start(self) -> None:
        """Forget earlier notes, and wrap the method of FSDP if FSDP has been imported."""
        super().start()
        for notes in (self._calls, self._lengths, self._passes, self._changes, self._while_scaled):
            notes.clear()
        self._stepped.clear()
        self._empty = 0
        if _FSDP in sys.modules and not self._wrapped_fsdp:
            self._wrapped_fsdp = True
            wrap(sys.modules[_FSDP].FullyShardedDataParallel, "clip_grad_norm_", self._around_method)

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Note which gradients there are, and forget the norms of those that a step has used."""
        self._pass, self._inside = number, True
        self._note_lengths(one for optimizer in self._stepped for one in parameters_of(optimizer))
        self._stepped.clear()
        self._before_pass = PassGradients(self._parameters())
        for call in self._all_calls():
            call.lasts = total(lengths_of(call.parameters)) >= 0.5 * total(call.after) > 0

    def backward_ends(self, number: int) -> Facts | None:
        """Note the norms of gradients that this pass changed, and mark clipped ones to which it added as kept.

        Those that it did not change, such as another model's, keep their notes: the script may have multiplied them.
        """
        self._inside = False
        changed = [one for one in self._parameters() if self._before_pass.is_changed(one)]
        self._note_lengths(changed)
        names = set(map(id, changed))
        for call in self._all_calls():
            if call.noted["pass"] < number and not call.noted["late"]:
                call.noted["kept"] |= call.lasts and not names.isdisjoint(call.after)
        return None

    def _parameters(self) -> Iterator[Tensor]:
        return (one for optimizer in self._optimizers for one in parameters_of(optimizer))

    def _all_calls(self) -> Iterable[ClippingCall]:
        return {id(call): call for calls in self._calls.values() for call in calls}.values()

    def _note_lengths(self, parameters: Iterable[Tensor]) -> None:
        parameters = list(parameters)
        lengths = lengths_of(parameters)
        for name in map(id, parameters):
            self._lengths[name], self._passes[name] = lengths.get(name, 0.0), self._pass

    def _is_current(self, call: ClippingCall, name: int) -> bool:
        return bool(call.noted["pass"] >= self._passes.get(name, -1))

    def scaled(self, parameters: Iterable[Tensor], factor: float) -> None:
        """Note that a library has multiplied gradients as part of its backward passes; the script itself has not."""
        for one in parameters:
            if id(one) in self._lengths:
                self._lengths[id(one)] *= factor

    def before_step(self, optimizer: Optimizer) -> None:
        """Find the factor by which the script itself multiplied gradients."""
        by_hand = self._changes_by_hand(optimizer)
        if by_hand:
            self.on_edited()
        self._changes[id(optimizer)] = {
            "by_hand": by_hand or None,
            "while_scaled": self._while_scaled.pop(id(optimizer), None),
            "edited": self._is_edited(optimizer),
        }

    def _is_unscaled(self, optimizer: Optimizer) -> None:
        if self.recording:
            self._while_scaled[id(optimizer)] = self._changes_by_hand(optimizer)

    def multiplied_by_hand(self) -> float | None:
        """Return the factor by which the script itself has multiplied all gradients since the last backward pass.

        It is 1 if the script has changed none, and None if it has changed them in another way.
        """
        stepped = [opt for opt in self._optimizers if any(one.grad is not None for one in parameters_of(opt))]
        changes = [self._changes_by_hand(optimizer) for optimizer in stepped]
        factors = [change.get("factor", 1.0) for change in changes] or [1.0]
        first: float | None = factors[0]
        return first if first and all(one and abs(one - first) <= SAME_FACTOR * first for one in factors) else None

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        self._stepped.add(optimizer)
        parameters = parameters_of(optimizer)
        empty, self._empty = self._empty, 0
        calls = [call.facts_for(optimizer) for call in self._calls.pop(id(optimizer), [])]
        return {
            "empty": empty,
            "of": sum(parameter.grad is not None for parameter in parameters),
            "roundings": ROUNDINGS * max((_epsilon(one) for one in parameters), default=0.0),
            **self._changes.pop(id(optimizer), {"by_hand": None, "while_scaled": None, "edited": False}),
            "calls": [call for call in calls if not call["instead"]],
            "missed": [call for call in calls if call["instead"]],
        }

    def stop(self) -> None:
        super().stop()
        self._calls.clear()
        self._lengths.clear()
        self._passes.clear()
        self._measured = None

    def _around(self, kind: str) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self.attends or self._depth or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            given = args[0] if args else kwargs.get("parameters")
            # A generator expression that yields nothing may be meant: all parameters may be frozen.
            is_used_up = isinstance(given, GeneratorType) and given.gi_frame is None
            parameters = [given] if isinstance(given, Tensor) else list(given or ())
            if not isinstance(given, (Tensor, Sequence)):  # the iterator is used up now, and torch warns of empty ones
                self._empty += self.recording and not parameters
                again = (one for one in parameters)
                args, kwargs = ((again, *args[1:]), kwargs) if args else (args, {**kwargs, "parameters": again})
            bound: dict[str, Any] = {}
            with self.notes():
                bound = inspect.signature(original).bind(*args, **kwargs).arguments
                meant, instead = self._meant_by(parameters) if parameters or is_used_up else ([], "")
                if instead:
                    parameters, bound["instead"] = meant, instead
            return self._noted(kind, parameters, bound, lambda: original(*args, **kwargs))

        return around

    def _meant_by(self, given: Sequence[Tensor]) -> tuple[list[Tensor], str]:
        """Return the parameters of which a call should clip gradients, and what it was given instead: "" if these."""
        owners = {id(one.grad): one for one in self._parameters() if one.grad is not None}
        if given and owners.keys() >= set(map(id, given)):
            return [owners[id(one)] for one in given], "the gradients instead of the parameters"
        held = set(map(id, self._parameters()))
        if not owners or any(one.grad is not None or id(one) in held for one in given):
            return [], ""
        views = {place: one for one in owners.values() if (place := _place(one))}
        if meant := [views[place] for one in given if (place := _place(one)) in views]:
            return meant, "detached parameters, which have no gradients"
        every = list(map(parameters_of, self._optimizers))
        trained = [own for own in every if any(self._passes.get(id(one)) == self._pass for one in own)]
        if not given and len(trained) == 1:
            return list(trained[0]), "a generator that was used up"
        shapes = sorted(one.shape for one in given)
        for parameters in trained:
            if shapes == sorted(one.shape for one in parameters):
                return list(parameters), "other tensors of the same shapes, which have no gradients"
        return [], ""

    def _around_norm(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a call of get_total_norm(tensors, norm_type), because gradients can be clipped with its result later."""
        if not self.attends or self._depth or torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        given = tensors if isinstance(tensors, (Tensor, Sequence)) else list(tensors)
        result = original(given, *args, **kwargs)
        with self.notes():
            value, norm_type = number(result), float(args[0] if args else kwargs.get("norm_type", 2.0))
            gradients = tuple(map(ref, [given] if isinstance(given, Tensor) else given))
            self._measured = None if value is None else Norm(value, norm_type, gradients)
        return result

    def _around_method(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a call of FullyShardedDataParallel.clip_grad_norm_(max_norm, norm_type)."""
        if not self.attends or self._depth:
            return original(module, *args, **kwargs)
        bound: dict[str, Any] = {}
        with self.notes():
            bound = inspect.signature(original).bind(module, *args, **kwargs).arguments
        return self._noted("norm", list(module.parameters()), bound, lambda: original(module, *args, **kwargs))

    def _noted(self, kind: str, parameters: list[Tensor], bound: dict[str, Any], clip: Callable[[], Any]) -> Any:
        before: dict[int, float] = {}
        with self.notes():
            before = lengths_of(parameters)
            self.on_clipping(parameters)
        self._depth += 1
        try:
            result = clip()
        finally:
            self._depth -= 1
        with self.notes():
            self.on_clipped(parameters)
            if self.recording:
                self._note(kind, parameters, bound, before, result)
        return result

    def _note(self, kind: str, parameters: list[Tensor], bound: Facts, before: dict[int, float], result: Any) -> None:
        owners = [optimizer for optimizer in self._optimizers if before.keys() & set(map(id, parameters_of(optimizer)))]
        given, norm_type = "total_norm" in bound, float(bound.get("norm_type", 2.0))
        if given and self._measured is not None and self._measured.is_of(parameters, bound["total_norm"]):
            given, norm_type = False, self._measured.norm_type
        noted = {
            "kind": kind,
            "limit": float(bound["max_norm"] if kind == "norm" else bound["clip_value"]),
            "norm_type": norm_type,
            "returned": number(bound.get("total_norm", result)),
            "given": given,
            "pass": self._pass,
            "inside": self._inside,
            "late": bool(owners) and all(optimizer in self._stepped for optimizer in owners),
            "kept": False,
            "sharded": any(map(is_shard, parameters)),
            "instead": bound.get("instead", ""),
        }
        scales = {id(optimizer): self._scale_left(optimizer, before) for optimizer in owners}
        clipped = [one for one in parameters if id(one) in before]
        call = ClippingCall(noted, clipped, before, lengths_of(parameters), scales)
        for optimizer in owners:
            self._calls.setdefault(id(optimizer), []).append(call)

    def _scale_left(self, optimizer: Optimizer, lengths: dict[int, float]) -> float:
        """Return the loss scale that is still in the gradients. The script can also have unscaled them itself."""
        scale = self._loss_scale.pending_scale(optimizer)
        known = [name for name in lengths if self._lengths.get(name)]
        if scale != 1.0 and known:
            ratio = total({name: lengths[name] for name in known}) / total({n: self._lengths[n] for n in known})
            if ratio * math.sqrt(scale) < 1.0:  # nearer to 1 / scale than to 1
                return 1.0
        return scale

    def _changes_by_hand(self, optimizer: Optimizer) -> Facts:
        """Compare gradients' norms with those after the last backward pass, corrected for clipping and unscaling."""
        scale = self._loss_scale.scale / self._loss_scale.pending_scale(optimizer)
        now = lengths_of(parameters_of(optimizer))
        factors = []
        for parameter in parameters_of(optimizer):
            name = id(parameter)
            expected = self._lengths.get(name, 0.0) / scale
            for call in self._calls.get(id(optimizer), []):
                if self._is_current(call, name) and call.before.get(name):
                    expected *= call.after[name] / call.before[name]
            if expected > 0 and math.isfinite(expected) and math.isfinite(now.get(name, math.nan)):
                factors.append((now[name] / expected, ROUNDINGS * _epsilon(parameter)))
        if all(abs(factor - 1) <= rounding for factor, rounding in factors):
            return {}
        middle = sorted(factor for factor, _ in factors)[len(factors) // 2]
        common = all(abs(factor - middle) <= rounding * middle for factor, rounding in factors)
        return {"factor": middle if common else None}

    def _is_edited(self, optimizer: Optimizer) -> bool:
        """Return whether norms of gradients have changed since clipping, and not all by the same factor."""
        calls = [call for call in self._calls.get(id(optimizer), []) if not call.noted["late"]]
        clipped = {
            name: length for call in calls for name, length in call.after.items() if self._is_current(call, name)
        }
        now = lengths_of(parameters_of(optimizer)) if clipped else {}
        factors = sorted(
            (now[name] / clipped[name], ROUNDINGS * _epsilon(one))
            for one in parameters_of(optimizer)
            if math.isfinite(now.get(name := id(one), math.nan)) and 0 < clipped.get(name, 0.0) < math.inf
        )
        middle = factors[len(factors) // 2][0] if factors else 1.0
        return any(abs(factor - middle) > rounding * max(middle, factor) for factor, rounding in factors)


def _place(tensor: Tensor) -> tuple[int, torch.Size] | None:
    """Return where the values of a tensor are, which is the same for ``parameter.detach()``; None if it has none."""
    own = local(tensor.detach())
    return (own.data_ptr(), own.shape) if own.numel() and own.layout == torch.strided and not own.is_meta else None


def _epsilon(parameter: Tensor) -> float:
    """Return the machine epsilon of a parameter's dtype; 0 for integers, such as frozen quantised weights."""
    return torch.finfo(parameter.dtype).eps if parameter.is_floating_point() or parameter.is_complex() else 0.0


@dataclass(frozen=True, eq=False)
class Norm:
    """What torch.nn.utils.get_total_norm returned for gradients."""

    value: float
    norm_type: float
    gradients: Sequence[ref[Tensor]]

    def is_of(self, parameters: Iterable[Tensor], total_norm: Any) -> bool:
        """Return whether ``total_norm`` is this value, and this is the norm of exactly these parameters' gradients."""
        own = {id(one.grad) for one in parameters if one.grad is not None}
        return {id(one()) for one in self.gradients} == own and number(total_norm) == self.value


@dataclass(eq=False)
class ClippingCall:
    """One clipping call, with the norms of gradients before and after it, by the parameter's id.

    ``noted`` has its facts that are the same for each optimizer. ``scales`` has the loss scale that was left, by the
    optimizer's id. ``lasts``: the gradients were still clipped ones when the latest backward pass began.
    """

    noted: Facts
    parameters: Sequence[Tensor]
    before: dict[int, float]
    after: dict[int, float]
    scales: dict[int, float]
    lasts: bool = False

    def facts_for(self, optimizer: Optimizer) -> Facts:
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        before = {name: value for name, value in self.before.items() if name in own}
        norm = total(before)
        return {
            **self.noted,
            "covered": len(before),
            "norm": norm,
            "others": total({name: value for name, value in self.before.items() if name not in own}),
            "factor": total({name: value for name, value in self.after.items() if name in own}) / norm if norm else 1.0,
            "scale": self.scales.get(id(optimizer), 1.0),
        }


def lengths_of(parameters: Iterable[Tensor]) -> dict[int, float]:
    """Return the 2-norms of the existing gradients, computed in float64, by the parameter's id."""
    lengths = {}
    for parameter in parameters:
        if parameter.grad is not None:
            own = local(parameter.grad.detach())
            lengths[id(parameter)] = norm_in_float64(own.coalesce()._values() if own.is_sparse else own)
    return lengths


def total(lengths: dict[int, float]) -> float:
    """Return the 2-norm of all gradients together."""
    return math.hypot(*lengths.values())


def number(value: Any) -> float | None:
    """Return a norm as a number; None if it is spread over ranks, so that reading it would communicate."""
    if isinstance(value, Tensor) and local(value) is value:
        return float(value)
    return float(value) if isinstance(value, (int, float)) else None
