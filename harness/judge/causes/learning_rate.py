"""Why steps used other learning rates: ways to step a schedule, each a sequence of rates to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.core.finding import Finding
from harness.judge.causes.cause import Cause, explained
from harness.judge.trace_analysis import TraceAnalysis

Rates = tuple[float, ...]

PRECISION = 1e-9
"""Rates that are nearer to each other than this part of them are the same: different ways to compute one number."""


def explain(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return a finding about learning rates with a cause: the first way of stepping that gives all of its rates."""
    rank = finding.rank or 0
    used = [step.learning_rates for step in analysis.trace.ranks[rank].steps if not step.skipped]
    others = [[step.learning_rates for step in trace.steps if not step.skipped] for trace in analysis.trace.ranks]
    way = next(
        (cause for cause, places in _ways(analysis, rank) if same_rates(used, rates_at(places, analysis))),
        None,
    )
    if way is None and any(other != used for other in others):
        way = Cause("rates-differ", "optimizer", "ranks step with different learning rates")
    return explained(finding, way, _without_schedule(used, analysis), _scaled(used, analysis), _ANOTHER)


_ANOTHER = Cause("another-rate", "optimizer", "which learning rate, or which schedule, is this?")


def _ways(analysis: TraceAnalysis, rank: int) -> Iterator[tuple[Cause, list[int]]]:
    """Yield what a mistake is called, and at which place of the schedule it steps each time."""
    steps = analysis.trace.ranks[rank].steps
    taken = [attempt for attempt, step in enumerate(steps) if not step.skipped]
    count, world = len(taken), analysis.cell.processes
    epoch = analysis.epochs.windows
    batches = [sum(len(step.micro_batches) for step in steps[:attempt]) for attempt in taken]
    if taken != list(range(count)):
        look = "the schedule goes on at a step that was skipped"
        yield Cause("schedule-steps-when-skipped", "amp", look), taken
    for name, look, places in (
        ("schedule-never-stepped", "is scheduler.step() ever called?", [0] * count),
        ("schedule-stepped-every-epoch", "it counts optimizer steps, not epochs", [a // epoch for a in taken]),
        ("schedule-stepped-first", "call scheduler.step() after the optimizer's", [i + 1 for i in range(count)]),
        ("schedule-stepped-every-micro-batch", "it counts optimizer steps, not micro-batches", batches),
        ("schedule-stepped-every-micro-batch", "it counts optimizer steps, not micro-batches", [
            after - 1 for after in [*batches[1:], batches[-1] + len(steps[taken[-1]].micro_batches)]
        ] if batches else []),
        ("schedule-stepped-once-a-rank", "it counts steps, not those of all ranks", [i * world for i in range(count)]),
        ("schedule-stepped-twice", "something steps it a second time", [i * 2 for i in range(count)]),
    ):  # fmt: skip
        yield Cause(name, "optimizer", look), places


def rates_at(places: list[int], analysis: TraceAnalysis) -> list[Rates]:
    """Return the workload's rates at places of its schedule."""
    optimizer = analysis.oracle.optimizer()
    schedule = analysis.oracle.schedule(optimizer)
    analysis.oracle.set_gradients({})
    rates = []
    for _ in range(max(places, default=0) + 1):
        rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        optimizer.step()  # without gradients it changes nothing; a schedule insists on it
        schedule()
    return [rates[place] for place in places]


def _without_schedule(used: list[Rates], analysis: TraceAnalysis) -> Cause | None:
    bare = [tuple(float(group["lr"]) for group in analysis.oracle.optimizer().param_groups)] * len(used)
    if same_rates(used, bare):
        return Cause("no-schedule", "optimizer", "the rate is the optimizer's own: is there a scheduler?")
    return None


def _scaled(used: list[Rates], analysis: TraceAnalysis) -> Cause | None:
    """One factor between the rates that were used and those that were due."""
    due = rates_at(list(range(len(used))), analysis)
    factors = [u / d for mine, right in zip(used, due, strict=True) for u, d in zip(mine, right, strict=False) if d]
    if not factors or any(abs(a - b) > PRECISION * abs(a) for a, b in pairwise(factors)):
        return None
    world = analysis.cell.processes
    known = {world: "the world size", 1 / world: "one part of the world size"}
    what = next((name for value, name in known.items() if abs(value - factors[0]) <= PRECISION * value), "a constant")
    return Cause("rate-scaled", "optimizer", f"{factors[0]:.4g} × the workload's rate at every step: {what}")


def same_rates(left: list[Rates], right: list[Rates]) -> bool:
    """Say whether two sequences of rates are the same numbers."""
    return len(left) == len(right) and all(
        len(a) == len(b) and all(abs(x - y) <= PRECISION * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True))
        for a, b in zip(left, right, strict=True)
    )
