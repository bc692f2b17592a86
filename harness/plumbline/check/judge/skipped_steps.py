"""Checks that steps are skipped on all ranks and only for infinities or NaN, and that other steps stay finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from plumbline.check.evidence.training import RecordedStep, RecordedTraining
from plumbline.check.judge.noted import ObserverFacts, failed_observers, noted, side_by_side
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.evidence.training_record import SkippedStep, step_copies
from plumbline.judge.checks.skipped_steps import (
    CHECK,
    moved_when_skipped,
    passed_with,
    skipped_for_nothing,
    skipped_on_some_ranks,
    skipped_without_overflow,
)

OBSERVER = "loss-scale"


def judge_skipped_steps(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what is wrong with skipped steps and infinities, or how many were skipped; nothing without a scaler."""
    flaws = [_on_some_ranks, _moved, _for_nothing, _without_overflow, _not_finite]
    found = [finding for flaw in flaws if (finding := next(flaw(training), None)) is not None]
    yield from found
    yield from failed_observers(training, OBSERVER, CHECK)
    scaled = [one for one in noted(training, OBSERVER) if one.facts["scaled"]]
    if scaled and not found:
        yield passed_with(sum(one.step.skipped for one in scaled), len(scaled), ranks=training.world_size)


def _skipped(one: ObserverFacts) -> SkippedStep:
    moved = one.facts.get("moved") or {"weights": 0, "state": 0}
    what = "the optimizer's state" if moved["state"] else ""
    if moved["weights"]:
        what = f"{moved['weights']} of {counted(len(one.parameters), 'parameter')}"
    return SkippedStep(one.rank, one.number, what, one.facts.get("found", 0) + one.facts["bad"] > 0)


def _on_some_ranks(training: RecordedTraining) -> Iterator[Finding]:
    for ranks in side_by_side(training, OBSERVER):
        if step_copies(ranks.values()) and (flaw := skipped_on_some_ranks(ranks, CHECK)) is not None:
            yield flaw


def _moved(training: RecordedTraining) -> Iterator[Finding]:
    found = (moved_when_skipped(_skipped(one)) for one in noted(training, OBSERVER) if one.skipped)
    return (finding for finding in found if finding is not None)


def _for_nothing(training: RecordedTraining) -> Iterator[Finding]:
    """Find skipped steps whose gradients were finite on every rank. A scaler may take other ranks into account."""
    found = (skipped_for_nothing([*map(_skipped, ranks.values())]) for ranks in _skipped_by_all(training))
    return (finding for finding in found if finding is not None)


def _without_overflow(training: RecordedTraining) -> Iterator[Finding]:
    if len({one.optimizer for one in noted(training, OBSERVER)}) > 1:
        return  # if all gradients are clipped together, an infinity of one optimizer spreads to the others
    for ranks in _skipped_by_all(training):
        if not step_copies(ranks.values()) or not _far_from_overflow([one.step for one in ranks.values()]):
            continue
        for one in ranks.values():
            if (name := _infinite_where_passes_are_not(one.step)) is not None:
                evidence = "the backward passes computed finite ones on every rank"
                yield skipped_without_overflow(one.number, one.rank, name, evidence)


def _skipped_by_all(training: RecordedTraining) -> Iterator[Mapping[int, ObserverFacts]]:
    for ranks in side_by_side(training, OBSERVER):
        if len(ranks) == training.world_size and all(one.skipped for one in ranks.values()):
            yield ranks


def _far_from_overflow(steps: Sequence[RecordedStep]) -> bool:
    """Return whether gradients that arrived on all ranks are finite, and remain finite in any sum.

    A script may sum them over ranks in float16, whatever precision it trains in.
    """
    parameters = [parameter for step in steps for parameter in step.parameters]
    if not all(parameter.sampled for parameter in parameters):
        return False
    half = len(steps) > 1 or any(parameter.dtype == "float16" for parameter in parameters)
    most = torch.finfo(torch.float16 if half else torch.float32).max
    arrived = [step.norms(one.local) for step in steps for one in (*step.passes, *step.other_passes)]
    # Norms of projections are known to a fifth.
    return bool(arrived) and bool((2 * torch.stack(arrived).sum(0) <= most).all())


def _infinite_where_passes_are_not(step: RecordedStep) -> str | None:
    if not step.passes:
        return None
    arrived = torch.stack([step.norms(one.local) for one in step.passes]).any(0)
    bad = ~step.norms(step.before_clipping).isfinite() & arrived
    return next((one.name for one, is_bad in zip(step.parameters, bad, strict=True) if is_bad), None)


def _not_finite(training: RecordedTraining) -> Iterator[Finding]:
    for one in noted(training, OBSERVER):
        broken = one.facts.get("broken", 0)
        if not one.step.skipped and broken:
            hint = (
                f"rank {skipping} found an infinity and skipped its step, but the other ranks took theirs; let all "
                "ranks skip together: all-reduce the result of this check"
                if (skipping := _rank_that_skipped(training, one)) is not None
                else "call scaler.step(optimizer), not optimizer.step()"
                if any(each.scale != 1.0 for each in one.step.passes)
                else "use torch.autograd.detect_anomaly to find the first operation that is not finite"
            )
            observed = (
                f"the step made {counted(broken, 'parameter')} infinite or NaN (gradients that were not finite: "
                f"{one.facts['bad']})"
            )
            yield one.failed(CHECK, observed, hint, cause="not-finite", family="amp")


def _rank_that_skipped(training: RecordedTraining, one: ObserverFacts) -> int | None:
    """Return a rank that computed infinities in a pass that other ranks did not run before a step, None without one.

    It skipped an own step after this pass. The other ranks took theirs with what they received of the infinities.
    """
    ranks = [(rank.rank, step) for rank in training.ranks for step in rank.steps]
    same = [(rank, step) for rank, step in ranks if (step.number, step.optimizer) == (one.number, one.optimizer)]
    fewest = min(len(step.passes) for _, step in same)
    skipped = (
        rank
        for rank, step in same
        if any(not bool(each.local.isfinite().all()) for each in step.passes[: len(step.passes) - fewest])
    )
    return next(skipped, None)
