"""Was a step skipped where gradients were not finite, on all ranks, and without a trace; and taken everywhere else?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from plumbline.check.evidence.training import RecordedStep, RecordedTraining
from plumbline.check.judge.noted import ObserverFacts, failed_observers, listed, noted, same_parameters, side_by_side
from plumbline.core.finding import Finding
from plumbline.judge.findings import passed
from plumbline.report.text import counted

OBSERVER = "loss-scale"
CHECK = "skipped-steps"


def judge_skipped_steps(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what is wrong with skipped steps and infinities, or how many were skipped; nothing without a scaler."""
    flaws = [_on_some_ranks, _moved, _for_nothing, _without_overflow, _not_finite]
    found = [finding for flaw in flaws if (finding := flaw(training)) is not None]
    yield from found
    yield from failed_observers(training, OBSERVER, CHECK)
    scaled = [one for one in noted(training, OBSERVER) if one.facts["scaled"]]
    if scaled and not found:
        skipped = sum(one.step.skipped for one in scaled)
        over = " over all ranks" if training.world_size > 1 else ""
        yield passed(CHECK, f"the GradScaler skipped {skipped} of {counted(len(scaled), 'step')}{over}")


def _on_some_ranks(training: RecordedTraining) -> Finding | None:
    for ranks in side_by_side(training, OBSERVER):
        skipped = [rank for rank, one in ranks.items() if one.step.skipped]
        if 0 < len(skipped) < len(ranks) and same_parameters(ranks.values()):
            return _failed(
                f"the GradScaler skipped a step on rank {listed(skipped)} but not on "
                f"{listed(rank for rank in ranks if rank not in skipped)}, so their weights differ from then on",
                "average scaled gradients over ranks before unscaling them, so that all ranks detect the overflow",
                ranks[skipped[0]],
                "skipped-on-some-ranks",
            )
    return None


def _moved(training: RecordedTraining) -> Finding | None:
    for one in noted(training, OBSERVER):
        moved = one.facts.get("moved") or {}
        if one.step.skipped and any(moved.values()):
            what = counted(moved["weights"], "parameter") if moved["weights"] else "the optimizer's state"
            return _failed(
                f"the GradScaler skipped a step, but {what} changed",
                "leave weights and optimizer state unchanged when a step is skipped",
                one,
                "moved-when-skipped",
            )
    return None


def _for_nothing(training: RecordedTraining) -> Finding | None:
    """Find skipped steps with gradients that were finite on every rank: a scaler may ask the others."""
    for ranks in _skipped_by_all(training):
        if not sum(one.facts.get("found", 0) + one.facts["bad"] for one in ranks.values()):
            return _failed(
                "the GradScaler skipped a step although every gradient was finite",
                "",
                ranks[min(ranks)],
                "skipped-for-nothing",
            )
    return None


def _without_overflow(training: RecordedTraining) -> Finding | None:
    if len({one.step.optimizer for one in noted(training, OBSERVER)}) > 1:
        return None  # where all gradients are clipped together, one's infinity is in the other's too
    for ranks in _skipped_by_all(training):
        if not same_parameters(ranks.values()) or not _far_from_overflow([one.step for one in ranks.values()]):
            continue
        for one in ranks.values():
            if (name := _infinite_where_passes_are_not(one.step)) is not None:
                return _failed(
                    f"the GradScaler skipped a step because the gradient of {name} is not finite, but its backward "
                    "passes computed finite gradients on every rank",
                    "call zero_grad() after a skipped step too",
                    one,
                    "skipped-without-overflow",
                )
    return None


def _skipped_by_all(training: RecordedTraining) -> Iterator[Mapping[int, ObserverFacts]]:
    for ranks in side_by_side(training, OBSERVER):
        if len(ranks) == training.world_size and all(one.step.skipped for one in ranks.values()):
            yield ranks


def _far_from_overflow(steps: Sequence[RecordedStep]) -> bool:
    """Return whether gradients that arrived on all ranks are finite, and stay so however they are added up.

    Over ranks a script may add them up in float16, whatever it trains in.
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
    given = step.received if step.unclipped is None else step.unclipped
    arrived = torch.stack([step.norms(one.local) for one in step.passes]).any(0)
    bad = ~step.norms(given).isfinite() & arrived
    return next((one.name for one, is_bad in zip(step.parameters, bad, strict=True) if is_bad), None)


def _not_finite(training: RecordedTraining) -> Finding | None:
    for one in noted(training, OBSERVER):
        broken = one.facts.get("broken", 0)
        if not one.step.skipped and broken:
            hint = (
                "call scaler.step(optimizer), not optimizer.step()"
                if any(each.scale != 1.0 for each in one.step.passes)
                else "use torch.autograd.detect_anomaly to find the first operation that is not finite"
            )
            return _failed(
                f"the step made {counted(broken, 'parameter')} infinite or NaN (gradients that were not finite: "
                f"{one.facts['bad']})",
                hint,
                one,
                "not-finite",
            )
    return None


def _failed(observed: str, hint: str, one: ObserverFacts, cause: str) -> Finding:
    return one.failed(CHECK, observed, hint, cause=cause, family="amp")
