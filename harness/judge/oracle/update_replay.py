"""Repeats a rank's optimizer steps with its own gradients: what the workload's optimizer makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.evidence.trace import RankTrace, Tensors
from harness.judge.error_outcome import Deviation
from harness.judge.oracle.noise import distance, in_noise, rounding_unit
from harness.judge.oracle.oracle import Optimizers, Oracle
from harness.judge.trace_analysis import TraceAnalysis

Meddling = Callable[[int, Oracle, Optimizers], None]
"""Something that is done to a replay before the step with this index."""


def replay(trace: RankTrace, analysis: TraceAnalysis, meddle: Meddling | None = None) -> Iterator[Deviation]:
    """Yield how far each parameter is, after each step taken, from what the optimizer makes of the gradients.

    Each step begins with the rank's own weights, so that only the optimizer's state is the replay's. Noise is what the
    same replay in the cell's storage precision differs by, at least one rounding.
    """
    exact = Oracle(analysis.workload, analysis.devices)
    rough = Oracle(analysis.workload, analysis.devices, analysis.cell.arithmetic)
    replays = [(oracle, oracle.optimizer()) for oracle in (exact, rough)]
    for index, step in enumerate(trace.steps):
        if step.skipped:
            continue
        if meddle is not None:
            for oracle, optimizer in replays:
                meddle(index, oracle, optimizer)
        right, rounded = (
            stepped(oracle, optimizer, step.before, step.gradients, step.learning_rates)
            for oracle, optimizer in replays
        )
        for name, value in step.after.items():
            if name not in right:
                continue  # the subject's own addition to the model: not the job's, so not judged
            parts = [step.before[name].double(), right[name] - step.before[name].double()]
            unit = rounding_unit(parts, analysis.epsilon)
            noise = max(unit, distance(rounded[name], right[name]))
            error = distance(value, right[name])
            yield Deviation(in_noise(error, noise), index, name, trace.rank)


def stepped(
    oracle: Oracle, optimizer: Optimizers, before: Tensors, gradients: Tensors, rates: tuple[float, ...]
) -> Tensors:
    """Return what a step makes of weights and gradients, at the subject's rate: whether that is right is not asked."""
    oracle.load(before)
    oracle.set_gradients(gradients)
    _set_learning_rates(optimizer, rates)
    optimizer.step()
    return oracle.weights()


def _set_learning_rates(optimizer: Optimizers, rates: tuple[float, ...]) -> None:
    """Give each parameter group the rate that the subject's optimizer had; nothing where they do not correspond."""
    if len(rates) == len(optimizer.param_groups):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
