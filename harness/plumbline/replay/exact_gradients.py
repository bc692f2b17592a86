"""Computes the exact local gradient of each backward pass: the sum over replays of the calls that it went through."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from plumbline.replay import agreement
from plumbline.replay.call import TrackedCall
from plumbline.replay.checkpointing import without_checkpoints
from plumbline.replay.draws import CompiledDraws, UnknownDrawError, are_known
from plumbline.replay.parameter_copies import ParameterCopies
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.reasons import COMPILED_DRAWS, NOT_REPEATABLE, OUTSIDE
from plumbline.replay.replay import (
    CannotReplayError,
    FailedReplayError,
    NeedsAllRanksError,
    Replayed,
    replay,
)
from plumbline.replay.tracked_calls import TrackedCalls
from plumbline.replay.unsharding import is_gathered

Reduce = Callable[[Tensor, nn.Parameter], Tensor]
"""A linear map of a parameter's gradient to what is kept, such as a projection."""

Look = Callable[[TrackedCall, ParameterCopies, ParameterCopies], None]
"""Called before each replay, with the call and the copies of parameters for exact and for native replays."""

Keeps = Callable[[Tensor], bool]
"""Returns whether the gradient of a parameter is needed."""

K = TypeVar("K")


@dataclass
class ExactPass:
    """The exact gradients of one backward pass.

    ``gradients`` has what is kept of the gradient of each parameter; ``uncovered`` says why other gradients are
    unknown. A parameter in neither was not used inside a tracked call. ``native`` has the same gradients in the
    training's own precision, if they were requested. ``communicates``: a call of the pass communicates with other
    ranks. ``beside`` has the parameters on which the loss depends in another way than through the outputs of calls.
    ``repeats``: nothing was recomputed, because an earlier pass of the same kind was, and with success.
    """

    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    native: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    uncovered: dict[nn.Parameter, str] = field(default_factory=dict)
    communicates: bool = False
    beside: set[Tensor] = field(default_factory=set)
    repeats: bool = False


class ExactGradients:
    """Replays calls immediately before an optimizer steps, while the weights are still those of the forward.

    The rounding noise of a module's outputs is kept from step to step. If the outputs of a later call are within this
    noise of its exact replay, the call is not replayed again in the training's own precision.

    A call is not replayed at all if it is of the same kind as earlier calls of its module, all of which could be
    replayed. Calls in which ranks depend on each other are always replayed.
    """

    def __init__(
        self,
        calls: TrackedCalls,
        reduce: Reduce,
        truth: ReplayPrecision = ReplayPrecision.FLOAT64,
        keeps: Keeps = lambda parameter: True,
        look: Look = lambda call, exact, native: None,
    ) -> None:
        self._calls = calls
        self._look = look
        self._keeps = keeps
        self._truth = truth
        self._reduce = reduce
        self._noise: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
        self._compiled: WeakKeyDictionary[nn.Module, CompiledDraws | None] = WeakKeyDictionary()
        self._replayed: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()

    def forget(self) -> None:
        """Forget which kinds of calls have been replayed."""
        self._replayed.clear()

    def compute(
        self, *, kind: Hashable = None, sent: Hashable = None, recomputed_otherwise: bool = False
    ) -> dict[int, ExactPass]:
        """Return the exact gradients of all backward passes since the last time, by pass number.

        Args:
            kind: of these passes; None if they have to be recomputed in any case.
            sent: how often this rank communicated in each of them. This counts for calls whose backward pass runs own
                code; otherwise, only a wrapper's reduction communicates.
            recomputed_otherwise: a backward pass may have recomputed other values than its forward had. The replays
                then ignore torch's activation checkpoints, repeat the forward's random numbers in modules that run
                again, and are also done in the training's own precision.
        """
        with self._calls.paused(), without_checkpoints() if recomputed_otherwise else nullcontext():
            passes: dict[int, ExactPass] = {}
            step = _Step(
                self._reduce, passes, self._noise, self._compiled, self._truth, self._keeps,
                recomputed_otherwise=recomputed_otherwise,
            )  # fmt: skip
            pending, outside = self._calls.pending(), self._calls.take_outside()
            kinds = [
                (one.module, (kind, _kind(one), sent if one.runs_code else None, _ids(outside))) for one in pending
            ]
            repeats = (
                kind is not None
                and not (recomputed_otherwise or self._calls.unrecorded)
                and all(own in self._replayed.get(module, ()) for module, own in kinds)
                and all(map(_can_repeat, pending))
            )
            for call in pending if not repeats else ():
                step.gather(call)
            for call in pending:
                self._look(call, step.exact, step.native)
                if repeats:
                    passes |= {number: ExactPass(repeats=True) for number in call.cotangents}
                else:
                    step.replay(call)
            if not any(one.uncovered for one in passes.values()):
                for module, own in kinds:
                    self._replayed.setdefault(module, set()).add(own)
        self._calls.forget()
        for number, parameters in outside.items():
            for parameter in parameters:
                why = self._calls.unrecorded.get(parameter, OUTSIDE)
                passes.setdefault(number, ExactPass()).uncovered.setdefault(parameter, why)
                passes[number].beside.add(parameter)
        for one in passes.values():
            for parameter, why in self._calls.unrecorded.items():
                one.uncovered.setdefault(parameter, why)
            for parameter in one.uncovered:
                one.gradients.pop(parameter, None)
                one.native.pop(parameter, None)
        return passes


class _Step:
    """The replays before one optimizer step, which share the copies of the parameters."""

    def __init__(
        self,
        reduce: Reduce,
        passes: dict[int, ExactPass],
        noise: WeakKeyDictionary[nn.Module, float],
        compiled: WeakKeyDictionary[nn.Module, CompiledDraws | None],
        truth: ReplayPrecision,
        keeps: Keeps,
        recomputed_otherwise: bool,
    ) -> None:
        self._keeps = keeps
        self._truth = truth
        self._otherwise = recomputed_otherwise
        self._reduce = reduce
        self._passes = passes
        self._noise = noise
        self._compiled = compiled
        flat: dict[int, tuple[Tensor, Tensor]] = {}
        self.exact = ParameterCopies(truth, keeps, flat)
        self.native = ParameterCopies(ReplayPrecision.NATIVE, flat=flat)
        self._drawn: dict[nn.Module, list[torch.dtype] | None] = {}

    def gather(self, call: TrackedCall) -> None:
        """Gather sharded parameters, before ranks can diverge."""
        if not call.obstacle and any(is_gathered(one.parameter) for one in call.parameters):
            self.exact.leaves(call)
            self.native.leaves(call)

    def replay(self, call: TrackedCall) -> None:
        """Add the gradients of a call to its backward passes, or the reason why they are unknown."""
        for number in call.cotangents:
            self._passes.setdefault(number, ExactPass())
        try:
            exact = self._exactly(call)
            self._check(call, exact)
            if self._otherwise:
                self._added(call, ReplayPrecision.NATIVE, None)
            self._uncover(call, exact.hidden, f"{call.name} uses this parameter, but does not hold it")
        except CannotReplayError as error:
            self._uncover(call, call.trainable, str(error))
            # A replay can fail on this rank alone, before it reaches a collective that the others wait for.
            failed_before = isinstance(error, FailedReplayError) and any(call.collectives.values())
            for number in call.cotangents:
                self._passes[number].communicates |= failed_before or isinstance(error, NeedsAllRanksError)
        self._uncover(call, call.foreign, f"{call.name} receives this parameter as an argument")

    def _exactly(self, call: TrackedCall) -> Replayed:
        if call.module not in self._drawn:
            # Outside of the handler, which keeps the checkpoints that the error has left open.
            with suppress(UnknownDrawError):
                return self._added(call, self._truth, None)
            self._drawn[call.module] = self._in_native(call).drawn
        try:
            return self._added(call, self._truth, self._drawn[call.module])
        except UnknownDrawError:
            raise CannotReplayError(
                f"{call.name}: its recomputation draws more random numbers than the forward"
            ) from None

    def _added(self, call: TrackedCall, precision: ReplayPrecision, drawn: list[torch.dtype] | None) -> Replayed:
        """Replay a call, and add its gradients to those of its passes once all of them are known."""
        found: dict[tuple[int, nn.Parameter], Tensor] = {}
        native = precision is ReplayPrecision.NATIVE

        def receive(number: int, parameter: nn.Parameter, gradient: Tensor) -> None:
            if self._keeps(parameter):
                _add(found, (number, parameter), self._reduce(gradient, parameter))

        copies = self.native if native else self.exact
        compiled = self._compiled_draws(call)
        replayed = replay(call, precision, receive, copies, drawn, forward_draws=self._otherwise, compiled=compiled)
        for (number, parameter), kept in found.items():
            one = self._passes[number]
            _add(one.native if native else one.gradients, parameter, kept)
        return replayed

    def _in_native(self, call: TrackedCall) -> Replayed:
        compiled = self._compiled_draws(call)
        return replay(
            call, ReplayPrecision.NATIVE, None, self.native, forward_draws=self._otherwise, compiled=compiled
        )  # fmt: skip

    def _compiled_draws(self, call: TrackedCall) -> CompiledDraws | None:
        """Return what draws for compiled code; None if the outputs are not nearer to those with compiled draws."""
        if not call.compiled or not are_known():
            return None
        if call.module not in self._compiled:
            draws = CompiledDraws(call.module)
            plain = replay(call, ReplayPrecision.NATIVE, None, self.native, compiled=draws)
            own = replay(call, ReplayPrecision.NATIVE, None, self.native, compiled=draws) if draws.are_any else plain
            apart = agreement.distance(call.outputs, own.outputs)
            is_nearer = apart < agreement.distance(call.outputs, plain.outputs)
            self._compiled[call.module] = draws if is_nearer else None
        return self._compiled[call.module]

    def _check(self, call: TrackedCall, exact: Replayed) -> None:
        """Raise an error if a call's outputs differ from its exact replay by more than a native replay's rounding."""
        apart = agreement.distance(call.outputs, exact.outputs)
        if call.module in self._noise and apart <= agreement.SPREAD * self._noise[call.module]:
            return
        native = self._in_native(call)
        if not agreement.reproduces(call.outputs, native.outputs, exact.outputs, call.eps):
            why = COMPILED_DRAWS if call.compiled and native.drawn else NOT_REPEATABLE
            raise CannotReplayError(f"{call.name}: {why}")
        self._noise[call.module] = max(self._noise.get(call.module, 0.0), apart)

    def _uncover(self, call: TrackedCall, parameters: Iterable[Tensor], why: str) -> None:
        for number in call.cotangents:
            for parameter in parameters:
                if isinstance(parameter, nn.Parameter):
                    self._passes[number].uncovered.setdefault(parameter, why)


def _kind(call: TrackedCall) -> Hashable:
    """Return what decides, apart from values, whether and how a call can be replayed."""
    return (
        tuple(mode for _, mode in call.training), call.autocast, call.default_dtype, call.compiled, call.runs_code,
        tuple((id(one.parameter), one.requires_grad, one.dtype) for one in call.parameters),
        tuple(one.dtype for one in call.outputs),
        frozenset(tuple(one is not None for one in given) for given in call.cotangents.values()),
    )  # fmt: skip


def _ids(outside: Mapping[int, Sequence[nn.Parameter]]) -> Hashable:
    return frozenset(frozenset(map(id, parameters)) for parameters in outside.values())


def _can_repeat(call: TrackedCall) -> bool:
    """Return whether this rank alone can tell that a replay of the call would show nothing new."""
    depends = call.obstacle or call.foreign or any(call.collectives.values())
    return not depends and not call.is_changed and not any(is_gathered(one.parameter) for one in call.parameters)


def _add(sums: dict[K, Tensor], key: K, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value
