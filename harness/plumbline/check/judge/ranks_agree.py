"""Whether all ranks hold the same weights after each step, where gradients are reduced."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from plumbline.check.evidence.training import RecordedStep, RecordedTraining, ScriptStep
from plumbline.check.judge.noted import failed_observers, information
from plumbline.check.judge.rank_layout import RankLayout, rank_layout
from plumbline.check.judge.recorded_weights import (
    RankWeights,
    common_steps,
    of_all,
    reduced_parameters,
    weights_at,
)
from plumbline.core.finding import Finding
from plumbline.judge.causes.weights import FirstDifference, PartedRanksCase, differing_parameters
from plumbline.judge.checks.skipped_steps import skipped_on_some_ranks
from plumbline.judge.findings import failed, passed
from plumbline.judge.hypothesis import Match, explain
from plumbline.report.text import counted

CHECK = "ranks-agree"


def judge_ranks_agree(training: RecordedTraining) -> Iterator[Finding]:
    """Yield one finding: the first step after which ranks differ that began it with the same weights, or none does."""
    yield from failed_observers(training, "weights", CHECK)
    if training.world_size == 1:
        return
    layout = rank_layout(training)
    reduced = reduced_parameters(training)
    known: set[str] = set()
    seen: set[str] = set()
    compared, differing_steps, parts = 0, 0, set[str]()
    for place, steps in common_steps(training):
        weights = list(weights_at(place, steps))
        differing = [one for one in weights if one.differ("after")]
        compared += bool(weights)
        if len(weights) < (every := len(next(iter(steps.values())).parameters)):
            parts.add(of_all(len(weights), every))
        differing_steps += bool(differing)
        found = [one for one in differing if one.parameter.name not in known and not one.is_rounding]
        known.update(one.parameter.name for one in differing)
        optimizer = next(iter(steps.values())).optimizer
        if accused := [one for one in found if must_agree(one, optimizer, layout, reduced)]:
            first = any(one.parameter.name not in seen for one in accused if one.differ("before"))
            yield _failure(place, steps, accused, len(weights), first=first)
            return
        seen.update(one.parameter.name for one in weights)
    if not compared:
        return
    if not differing_steps:
        what = f"values of the {min(parts)} that every rank holds whole" if parts else "weights"
        yield passed(CHECK, f"all ranks hold the same {what}, bit for bit, after each of {counted(compared, 'step')}")
    elif layout.is_data_parallel:
        yield passed(
            CHECK, f"weights that ranks share agree, up to rounding, after each of {counted(compared, 'step')}"
        )
    else:
        yield information(
            CHECK, f"ranks hold different weights after {differing_steps} of {compared} steps; {layout.reason}"
        )


def must_agree(weights: RankWeights, optimizer: int, layout: RankLayout, reduced: Collection[tuple[int, str]]) -> bool:
    """Say whether a parameter is meant to be the same on all ranks: a wrapper or its gradients say so."""
    if (optimizer, weights.parameter.name) in reduced:
        return True
    return layout.is_data_parallel and (weights.is_wrapped or weights.share_gradient)


def _failure(
    place: int, steps: Mapping[int, RecordedStep], accused: list[RankWeights], of: int, *, first: bool
) -> Finding:
    records = {rank: ScriptStep(rank, place, step.optimizer, step=step) for rank, step in steps.items()}
    if (alone := skipped_on_some_ranks(records, CHECK)) is not None:
        return alone
    worst = max(accused, key=lambda one: one.distance)
    what = differing_parameters([one.parameter.name for one in accused], of)
    message = f"{what} between ranks after the step, by up to {worst.distance:.2g} of the norm"
    finding = failed(CHECK, message, step=place, parameter=worst.parameter.name)
    return explain(finding, PartedScriptCase(accused, first_seen=first))


@dataclass(frozen=True, eq=False)
class PartedScriptCase(PartedRanksCase):
    """Parameters that differ between the ranks of a script after a step; ``first_seen``: nothing is known from before.

    Learning rates are not among the differences: their check names them.
    """

    accused: Sequence[RankWeights]
    first_seen: bool

    @property
    def first_difference(self) -> tuple[FirstDifference, Match]:
        if any(one.differ("before") for one in self.accused):
            return ("weights before the first step" if self.first_seen else "weights before a step"), Match()
        return ("gradients" if any(one.differ("gradients") for one in self.accused) else "update"), Match()
