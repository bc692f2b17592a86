"""Why an update is wrong although the optimizer's gradient is known: hypotheses about the first step that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from plumbline.core.finding import Finding
from plumbline.evidence.trace import Step, Tensors
from plumbline.judge.causes.shared_memory import SHARED_MEMORY
from plumbline.judge.causes.stage_pattern import HeldParameters, names_in_words
from plumbline.judge.hypothesis import Hypothesis, Match, TraceCase, holds
from plumbline.judge.oracle.noise import norm
from plumbline.judge.oracle.oracle import Oracle
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.judge.update_replay import weights_after

KNOWN_TO = 1e-3
"""How well an update is known that rounded weights show, as a part of its length.

Chosen: it decides what an update is called that is known to be wrong, never whether it is.
"""


@dataclass(frozen=True, eq=False)
class UpdateCase(TraceCase):
    """One step of one rank, with the weights that the workload's optimizer makes of the rank's own gradients."""

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
        return all(bool(value.isfinite().all()) for value in self.step.gradients.values())

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
    def factor(self) -> float:
        """The factor that brings the right update nearest to the one that was made."""
        return float(self.made @ self.due / (self.due @ self.due))

    @property
    def is_multiple(self) -> bool:
        return not norm(self.made - self.factor * self.due) > KNOWN_TO * norm(self.made)


UpdateHypothesis = Hypothesis[UpdateCase, Match]


def update_case(finding: Finding, analysis: TraceAnalysis) -> UpdateCase | None:
    """Return the case of the finding's step; None if it has no step, or if the right update is zero."""
    if finding.step is None:
        return None
    case = UpdateCase(analysis, finding.step, analysis.judged_as(finding.rank or 0))
    nothing_due = case.step.skipped or (case.is_finite and norm(case.made) and not norm(case.due))
    return None if nothing_due else case


def _stored_in_float32(case: UpdateCase) -> Iterator[Match]:
    weights = [case.step.after[name] for name in case.names]
    if case.analysis.cell.arithmetic.storage == "float64" and all(
        torch.equal(value.float().double(), value.double()) for value in weights
    ):
        yield Match()


def _stepped_in_part(case: UpdateCase) -> Iterator[Match]:
    steps = case.analysis.steps[case.index].ranks
    before, after, right = case.step.before, case.step.after, case.right
    due = {name for name in right if name in after and norm(right[name] - before[name].double())}
    moved = [{name for name in due if not torch.equal(step.before[name], step.after[name])} for step in steps]
    own = moved[case.rank]
    if (
        0 < len(own) < len(due)
        and set().union(*moved) == due
        and all(
            norm(after[name].double() - right[name]) <= KNOWN_TO * norm(right[name] - before[name].double())
            for name in own
        )
    ):
        yield Match(figures={"own": len(own), "all": len(due)})


def _stage_not_updated(case: UpdateCase) -> Iterator[Match]:
    """Match if the parameters of one of the ranks that hold a model together did not move."""
    held = HeldParameters(case.analysis.holders[case.rank] if case.analysis.is_staged else {})
    for rank in held.ranks:
        own = [name for name, ranks in held.holders.items() if ranks[0] == rank and name in case.right]
        due = [name for name in own if norm(case.right[name] - case.step.before[name].double())]
        if due and all(torch.equal(case.step.after[name], case.step.before[name]) for name in due):
            yield Match(rank=rank, figures={"stage": rank, "held": names_in_words(due)})


def _other_rates_on_a_stage(case: UpdateCase) -> Iterator[Match]:
    together = case.analysis.recorded_together(case.index, case.rank)
    first, *others = [step.learning_rates for step in together.values()]
    if any(len(rates) == len(first) and rates != first for rates in others):
        yield Match()


def _scaled(case: UpdateCase) -> Iterator[Match]:
    if case.is_multiple:
        yield Match(figures={"factor": f"{case.factor:.6g}"})


HYPOTHESES = (
    UpdateHypothesis("not-finite", "amp", holds(lambda case: not case.is_finite),
        "the optimizer stepped with a gradient that is not finite",
        "check for infinities on every rank before the step", 190),
    UpdateHypothesis("stage-not-updated", "optimizer", _stage_not_updated,
        "the parameters that rank {stage} holds did not move ({held})",
        "check that the rank's optimizer has these parameters, and that nothing writes the old values back", 185),
    UpdateHypothesis("rates-differ", "optimizer", _other_rates_on_a_stage,
        "ranks that hold one model together use different learning rates",
        "step the schedule of every stage", 155),
    UpdateHypothesis("no-update", "optimizer", holds(lambda case: norm(case.made) == 0),
        "the weights did not move",
        "check whether something undoes the step", 180),
    UpdateHypothesis("stored-in-lower-precision", "amp", _stored_in_float32,
        "every weight is a float32 number, although the training is in float64",
        "check whether the model is cast to float32", 170),
    UpdateHypothesis("stepped-in-part", "sync", _stepped_in_part,
        "the rank updated {own} of {all} parameters, and other ranks updated the rest",
        "broadcast each rank's part of the weights after the step", 160),
    SHARED_MEMORY,
    UpdateHypothesis("another-optimizer", "optimizer", holds(lambda case: not case.is_multiple),
        "the update is not a multiple of the right one",
        "compare the optimizer's class, options and state with the workload's", 120),
    UpdateHypothesis("scaled-update", "optimizer", _scaled,
        "the update is {factor} × the right one",
        "check the learning rate, and whether several steps are taken per batch", 110),
)  # fmt: skip
