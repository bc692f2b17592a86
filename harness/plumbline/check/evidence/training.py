"""Records of a user's training on each rank: vectors of gradients and weights, and plain facts about each step.

A vector is one-dimensional float64. It has a segment for each parameter: the parameter's entries if there are at most
``SEGMENT`` of them, else a random projection of them. Both are linear, so a linear combination of vectors is the vector
of the linear combination.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from plumbline.evidence.projection import project
from plumbline.evidence.training_record import StepOfRanks, StepRecord, TrainingRecord
from plumbline.recording.observer import Facts as Facts

REPEATS = "repeats"
"""The fact of a backward pass that nothing was recomputed, because an earlier pass of the same kind was."""

SEGMENT = 64  # Most entries of a parameter's segment. A projection of this length gives a norm to 18 %.


def segment(tensor: Tensor, *, split: bool = True) -> Tensor:
    """Return the segment of one parameter's values: float64 on the CPU, at most ``SEGMENT`` entries.

    A complex number counts as two entries. ``split``: the projection of float64 values hardly rounds; see ``project``.
    """
    tensor = as_real(tensor)
    if tensor.numel() <= SEGMENT:
        return tensor.detach().to("cpu", torch.float64, copy=True).reshape(-1)
    return project(tensor, SEGMENT, split=split).sum(0)


def length(tensor: Tensor) -> int:
    return min(as_real(tensor).numel(), SEGMENT)


def as_real(tensor: Tensor) -> Tensor:
    """Return complex values as real ones with an added last dimension of size two, and real values unchanged."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class Parameter:
    """A parameter that an optimizer updates: its name in the user's model, its shape and dtype (``float32``).

    ``reduced`` is the dtype in which its gradients are summed over ranks, "" if it is the parameter's own. ``sampled``:
    whether it is judged; vectors omit parameters that are not. ``named``: whether a module that was called holds it; if
    not, its name is its position in the optimizer, which can be another parameter's on another rank. ``trained``:
    whether it requires a gradient, or is frozen. ``held_in`` is None if the optimizer holds the parameter itself. If
    optimizers hold copies of pieces of the model's parameters, this is one piece, and ``held_in`` is the number of the
    optimizer's parameter that contains it, or -1 if only other ranks' optimizers do. ``guessed``: whether it can also
    be a piece of another parameter with the same values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    reduced: str = ""
    sampled: bool = True
    named: bool = True
    trained: bool = True
    held_in: int | None = None
    guessed: bool = False

    @property
    def is_held(self) -> bool:
        """Whether this rank's optimizer updates it."""
        return self.held_in != -1

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        return min(self.entries, SEGMENT) if self.sampled else 0


class HasFacts:
    """Evidence with facts by the names of the observers that noted them."""

    facts: Facts

    def noted(self, observer: str) -> Facts:
        """Return what an observer noted, {} if it noted nothing."""
        return self.facts.get(observer) or {}


@dataclass(frozen=True)
class BackwardPass(HasFacts):
    """One backward pass on one rank, as far as it concerns the parameters of one optimizer.

    ``number`` counts the backward passes of the process. ``local`` is the vector of the gradients that arrived at the
    parameters, before any reduction over ranks. ``exact`` is the same vector, recomputed in float64 from the recorded
    inputs; it has NaN in the segments of parameters that could not be recomputed, and is None without a replay.
    ``scale`` is the loss scale, 1 without a scaler. ``native`` is like ``exact``, but computed in the training's own
    precision; it is set only if activation checkpoints recomputed other values than their forward.
    """

    VECTORS: ClassVar = ("local", "exact", "native")

    number: int
    local: Tensor
    exact: Tensor | None = None
    scale: float = 1.0
    facts: Facts = field(default_factory=dict)
    native: Tensor | None = None


@dataclass(frozen=True)
class RecordedStep(HasFacts):
    """One call of an optimizer's ``step`` on one rank.

    ``optimizer`` numbers the optimizers of the process, ``number`` the steps of this optimizer, from 0. ``received`` is
    the vector of the gradients that the optimizer received, NaN in the segments of parameters without a gradient.
    ``norm`` is the exact norm of these gradients. ``unclipped`` is the vector after the last backward pass and before a
    clipping function changed it; None if none did. ``replaced`` is what a clipping function left, if the script then
    changed it by more than one factor; ``unclipped`` is None in this case. ``after_backward`` is what the last
    backward pass left; it is recorded after a step whose gradients the script changed itself.
    ``passes`` has the backward passes since the optimizer's previous step that belong to this step. ``other_passes``
    has those that left gradients in its parameters, but belong to another optimizer's step. ``skipped``: the GradScaler
    skipped the step. ``left_out``: the number of passes that the judge left out, because the script changed the weights
    after them. ``discarded``: the number of those that the judge left out because the script discarded their gradients.
    ``facts`` has what observers noted.
    """

    VECTORS: ClassVar = ("received", "unclipped", "replaced", "after_backward")

    optimizer: int
    number: int
    parameters: tuple[Parameter, ...]
    received: Tensor
    passes: tuple[BackwardPass, ...]
    other_passes: tuple[BackwardPass, ...] = ()
    skipped: bool = False
    facts: Facts = field(default_factory=dict)
    norm: float = 0.0
    unclipped: Tensor | None = None
    replaced: Tensor | None = None
    after_backward: Tensor | None = None
    left_out: int = 0
    discarded: int = 0

    @property
    def before_clipping(self) -> Tensor:
        """The vector of the gradients before clipping, or as received if no clipping function changed them."""
        return self.received if self.unclipped is None else self.unclipped

    @cached_property
    def pieces(self) -> Mapping[int, Sequence[str]]:
        """The names of the parameters of which each of the optimizer's parameters holds pieces, by its number.

        It is empty if the optimizer holds the model's parameters themselves.
        """
        found: dict[int, list[str]] = {}
        for one in self.parameters:
            if one.held_in is not None:
                found.setdefault(one.held_in, []).append(one.name)
        return found

    @property
    def is_in_pieces(self) -> bool:
        """Whether the optimizer holds copies of the model's parameters, whole or in pieces."""
        return bool(self.pieces)

    @property
    def is_divided(self) -> bool:
        """Whether each rank steps some of the model's parameters, and other ranks the others."""
        return bool((self.facts.get("masters") or {}).get("divided"))

    @property
    def weights_move_between_passes(self) -> bool:
        """Whether the parameters with gradients were modified between the backward passes of the step."""
        known = (self._weights_at(one) for one in self.passes)
        return len({prints for prints in known if prints is not None}) > 1

    def at_last_weights(self, *, with_first: bool) -> RecordedStep:
        """Return the step with only the passes at the weights of the last one, and with those of the first one."""
        kept = {self._weights_at(self.passes[-1])} | ({self._weights_at(self.passes[0])} if with_first else set())
        passes = tuple(one for one in self.passes if self._weights_at(one) in kept)
        return replace(self, passes=passes, left_out=len(self.passes) - len(passes))

    def _weights_at(self, one: BackwardPass) -> int | None:
        prints: dict[int, int] = dict(one.facts.get("weights", ()))
        return prints.get(self.optimizer)

    def only(self, numbers: Sequence[int]) -> RecordedStep:
        """Return the step for the parameters with these numbers only. The norm and facts are still the whole step's."""

        def chosen(vector: Tensor) -> Any:
            parts = self.parts(vector)
            return torch.cat([parts[number] for number in numbers]) if numbers else vector[:0]

        def of(one: HasVectors) -> HasVectors:
            return replace(one, **{name: chosen(vector) for name, vector in vectors_of(one).items()})

        return replace(
            of(self),
            parameters=tuple(self.parameters[number] for number in numbers),
            passes=tuple(map(of, self.passes)),
            other_passes=tuple(map(of, self.other_passes)),
        )

    @cached_property
    def _lengths(self) -> list[int]:
        return [parameter.length for parameter in self.parameters]

    def parts(self, vector: Tensor) -> tuple[Tensor, ...]:
        return torch.split(vector, self._lengths) if self._lengths else ()

    def norms(self, vector: Tensor) -> Tensor:
        parts = self.parts(vector)
        return torch.stack(torch._foreach_norm(parts)) if parts else torch.zeros(0, dtype=torch.float64)


HasVectors = TypeVar("HasVectors", BackwardPass, RecordedStep)


def vectors_of(one: BackwardPass | RecordedStep) -> dict[str, Any]:
    """Return those vectors of a pass or a step that were recorded, by the names of their fields."""
    return {name: vector for name in one.VECTORS if (vector := getattr(one, name)) is not None}


@dataclass(frozen=True, eq=False)
class ScriptStep(StepRecord):
    """A step of a script in the form that any check can read."""

    step: RecordedStep = field(kw_only=True)

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.step.parameters)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(one.shape for one in self.step.parameters)

    @property
    def gradient_norm(self) -> float:
        return self.step.norm

    @property
    def learning_rates(self) -> tuple[float, ...]:
        return tuple(self.step.facts.get("learning-rate", {}).get("rates", ()))

    @property
    def skipped(self) -> bool:
        return self.step.skipped

    @property
    def passes(self) -> int:
        return len(self.step.passes)

    @property
    def schedule_moves(self) -> tuple[int, ...]:
        calls = self.step.facts.get("learning-rate", {}).get("schedule", ())
        numbers = [each.number for each in self.step.passes]
        moved = {bisect(numbers, number) - 1 for number, before_step in calls if before_step}
        return tuple(sorted(moved - {-1}))


@dataclass(frozen=True)
class RecordedRank(HasFacts):
    """One process of the training. ``world_size`` is that of torch.distributed, 1 without a process group.

    ``facts`` has what observers noted about the whole process. ``error`` says why recording ended early, "" if it did
    not.
    """

    rank: int
    world_size: int
    steps: tuple[RecordedStep, ...]
    facts: Facts = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, eq=False)
class RecordedTraining(TrainingRecord):
    """All processes of a training that took optimizer steps, ordered by rank. ``objective`` is the declared one.

    It is hashed by identity: several checks need what is derived from a whole training, so that it is cached.
    """

    ranks: tuple[RecordedRank, ...]
    objective: str = ""

    @property
    def world_size(self) -> int:
        return self.ranks[0].world_size

    @property
    def optimizer_steps(self) -> Iterator[ScriptStep]:
        for rank in self.ranks:
            for step in rank.steps:
                yield ScriptStep(rank.rank, step.number, step.optimizer, step=step)

    def at(self, place: int) -> StepOfRanks[RecordedStep]:
        """Return, by rank, the step with index ``place`` of each rank that has one."""
        return StepOfRanks({rank.rank: rank.steps[place] for rank in self.ranks if place < len(rank.steps)})

    @property
    def steps(self) -> Iterator[RecordedStep]:
        """Every step of every rank."""
        return (step for rank in self.ranks for step in rank.steps)

    @property
    def common_steps(self) -> Iterator[StepOfRanks[RecordedStep]]:
        """The steps of all ranks, as far as each rank recorded one; none if a rank recorded nothing at all."""
        if len(self.ranks) == self.world_size:
            yield from map(self.at, range(min(len(rank.steps) for rank in self.ranks)))
