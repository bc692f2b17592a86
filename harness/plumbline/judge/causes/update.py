"""Why an update does not follow from the optimizer's gradient: hypotheses about the first wrong step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch

from plumbline.core.finding import Finding
from plumbline.evidence.trace import Step, Tensors
from plumbline.judge.causes.shared_memory import SHARED_MEMORY
from plumbline.judge.causes.stage_pattern import HeldParameters, names_in_words
from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, TraceCase, holds, register
from plumbline.judge.oracle.noise import is_finite, norm
from plumbline.judge.oracle.oracle import Oracle
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.judge.update_replay import weights_after

KNOWN_TO = 1e-3
"""The precision to which rounded weights determine an update, as a part of the update's length.

This is a chosen number: it decides how a wrong update is named, never whether it is wrong.
"""


class UpdateCase(CountedCase):
    """One wrong step of one rank of any training, and the right update. Parameters are known by names or numbers."""

    digits = 6
    """The digits of the factor that are shown."""

    @property
    @abstractmethod
    def is_still(self) -> bool:
        """Whether no weight moved."""

    @property
    @abstractmethod
    def factor(self) -> float:
        """The factor that brings the right update nearest to the one that was made."""

    @property
    @abstractmethod
    def is_multiple(self) -> bool:
        """Whether the update that was made is the right one times the factor."""

    @property
    @abstractmethod
    def lower_precision(self) -> tuple[str, str] | None:
        """A lower-precision format that holds all weights exactly, and the training's format; None if there is none."""

    @property
    @abstractmethod
    def due_to_move(self) -> Set[str | int]:
        """The parameters that the right update moves."""

    @property
    @abstractmethod
    def moved(self) -> Sequence[Set[str | int]]:
        """The parameters that moved on this rank, then those on each of the others."""

    @abstractmethod
    def is_right(self, parameter: str | int) -> bool:
        """Whether a parameter moved as it should."""


@dataclass(frozen=True, eq=False)
class SubjectUpdateCase(TraceCase, UpdateCase):
    """One step of one rank, and the weights that the workload's optimizer computes from the rank's own gradients."""

    index: int
    rank: int

    @property
    def step(self) -> Step:
        return self.analysis.trace.ranks[self.rank].steps[self.index]

    @cached_property
    def right(self) -> Tensors:
        """The right weights after the step, in float64, from a replay of all steps until then."""
        oracle = Oracle(self.analysis.workload, self.analysis.devices)
        optimizer = oracle.optimizer()
        weights: Tensors = {}
        for step in self.analysis.trace.ranks[self.rank].steps[: self.index + 1]:
            if not step.skipped:
                weights = weights_after(oracle, optimizer, step.before, step.gradients, step.learning_rates)
        return weights

    @property
    def is_finite(self) -> bool:
        return is_finite(self.step.gradients)

    @property
    def names(self) -> list[str]:
        return [name for name in self.step.after if name in self.analysis.oracle.parameters]

    @cached_property
    def due(self) -> torch.Tensor:
        return self._update(self.right)

    @cached_property
    def made(self) -> torch.Tensor:
        return self._update(self.step.after)

    def _update(self, after: Tensors) -> torch.Tensor:
        before = self.step.before
        return torch.cat([(after[name].double() - before[name].double()).flatten() for name in self.names])

    @property
    def is_still(self) -> bool:
        return norm(self.made) == 0

    @property
    def factor(self) -> float:
        return float(self.made @ self.due / (self.due @ self.due))

    @property
    def is_multiple(self) -> bool:
        return not norm(self.made - self.factor * self.due) > KNOWN_TO * norm(self.made)

    @property
    def lower_precision(self) -> tuple[str, str] | None:
        arithmetic = self.analysis.cell.arithmetic
        stepped = arithmetic.stepped
        lower = "float32" if stepped == "float64" else arithmetic.storage if arithmetic.masters else None
        weights = (self.step.after[name].double() for name in self.names)
        dtype: torch.dtype = getattr(torch, lower or stepped)
        return (lower, stepped) if lower and all(torch.equal(one.to(dtype).double(), one) for one in weights) else None

    @cached_property
    def due_to_move(self) -> Set[str | int]:
        return {name for name in self.right if name in self.step.after and self._due_length(name)}

    @property
    def moved(self) -> Sequence[Set[str | int]]:
        steps = self.analysis.steps[self.index].ranks
        own = steps[self.rank]
        return [self._moved(own), *(self._moved(one) for one in steps if one is not own)]

    def _moved(self, step: Step) -> Set[str | int]:
        return {name for name in self.due_to_move if not torch.equal(step.before[str(name)], step.after[str(name)])}

    def is_right(self, parameter: str | int) -> bool:
        name = str(parameter)
        return norm(self.step.after[name].double() - self.right[name]) <= KNOWN_TO * self._due_length(name)

    def _due_length(self, name: str) -> float:
        return norm(self.right[name] - self.step.before[name].double())


UpdateHypothesis = Hypothesis[UpdateCase, Match]
SubjectUpdateHypothesis = Hypothesis[SubjectUpdateCase, Match]


def update_case(finding: Finding, analysis: TraceAnalysis) -> SubjectUpdateCase | None:
    """Return the case of the finding's step; None if it has no step, or if the right update is zero."""
    if finding.step is None:
        return None
    case = SubjectUpdateCase(analysis, finding.step, analysis.judged_as(finding.rank or 0))
    nothing_due = case.step.skipped or (case.is_finite and norm(case.made) and not norm(case.due))
    return None if nothing_due else case


def _stored_in_lower_precision(case: UpdateCase) -> Iterator[Match]:
    if case.lower_precision is not None:
        lower, precision = case.lower_precision
        yield Match(figures={"lower": lower, "precision": precision})


def _stepped_in_part(case: UpdateCase) -> Iterator[Match]:
    due, (own, *others) = case.due_to_move, case.moved
    if 0 < len(own) < len(due) and set(own).union(*others) == due and all(map(case.is_right, own)):
        yield Match(figures={"own": len(own), "all": len(due)})


def _stage_not_updated(case: SubjectUpdateCase) -> Iterator[Match]:
    held = HeldParameters(case.analysis.holders[case.rank] if case.analysis.is_staged else {})
    for rank in held.ranks:
        own = [name for name, ranks in held.holders.items() if ranks[0] == rank and name in case.right]
        due = [name for name in own if norm(case.right[name] - case.step.before[name].double())]
        if due and all(torch.equal(case.step.after[name], case.step.before[name]) for name in due):
            yield Match(rank=rank, figures={"stage": rank, "held": names_in_words(due)})


def _other_rates_on_a_stage(case: SubjectUpdateCase) -> Iterator[Match]:
    together = case.analysis.recorded_together(case.index, case.rank)
    first, *others = [step.learning_rates for step in together.values()]
    if any(len(rates) == len(first) and rates != first for rates in others):
        yield Match()


def _scaled(case: UpdateCase) -> Iterator[Match]:
    if case.is_multiple:
        yield Match(figures={"factor": f"{case.factor:.{case.digits}g}"})


register(
    UpdateCase,
    UpdateHypothesis("no-update", "optimizer", holds(lambda case: case.is_still),
        "the weights did not move",
        "check whether something undoes the step", 180),
    UpdateHypothesis("stored-in-lower-precision", "amp", _stored_in_lower_precision,
        "every weight is a {lower} number, although the training is in {precision}",
        "check whether the model is cast to {lower} and back", 170),
    UpdateHypothesis("stepped-in-part", "sync", _stepped_in_part,
        "the rank updated {own} of {all} parameters, and other ranks updated the rest",
        "broadcast each rank's part of the weights after the step", 160),
    UpdateHypothesis("scaled-update", "optimizer", _scaled,
        "the update is {factor} × the right one",
        "check the learning rate, and whether the update is applied several times", 110),
)  # fmt: skip

register(
    SubjectUpdateCase,
    SubjectUpdateHypothesis("not-finite", "amp", holds(lambda case: not case.is_finite),
        "the optimizer stepped with a gradient that is not finite",
        "check for infinities on every rank before the step", 190),
    SubjectUpdateHypothesis("stage-not-updated", "optimizer", _stage_not_updated,
        "the parameters that rank {stage} holds did not move ({held})",
        "check that the rank's optimizer has these parameters, and that nothing writes the old values back", 185),
    SubjectUpdateHypothesis("rates-differ", "optimizer", _other_rates_on_a_stage,
        "ranks that hold one model together use different learning rates",
        "step the schedule of every stage", 155),
    SHARED_MEMORY,
    SubjectUpdateHypothesis("another-optimizer", "optimizer", holds(lambda case: not case.is_multiple),
        "the update is not a multiple of the right one",
        "compare the optimizer's class, options and state with the workload's", 120),
)  # fmt: skip
