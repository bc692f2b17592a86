"""Replays a rank's optimizer steps: the workload's optimizer, applied to the rank's own gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.evidence.trace import RankTrace, Tensors
from harness.judge.oracle.noise import Deviation, replay_error, rounding_unit
from harness.judge.oracle.oracle import Optimizers, Oracle
from harness.judge.trace_analysis import TraceAnalysis

Intervention = Callable[[int, Oracle, Optimizers], None]
"""A change to a replay, made before the step with this index."""


def replay(trace: RankTrace, analysis: TraceAnalysis, intervene: Intervention | None = None) -> Iterator[Deviation]:
    """Yield how far each parameter is, after each step taken, from what the optimizer makes of the gradients.

    Each step begins with the rank's own weights, so that only the optimizer's state is the replay's. Noise is the error
    of the same replay in the cell's storage precision, at least one rounding.
    """
    oracles = [Oracle(analysis.workload, analysis.devices, precision) for precision in (None, analysis.cell.arithmetic)]
    replays = [(oracle, oracle.optimizer()) for oracle in oracles]
    for index, step in enumerate(trace.steps):
        if step.skipped:
            continue
        if intervene is not None:
            for oracle, optimizer in replays:
                intervene(index, oracle, optimizer)
        exact, replayed = (
            weights_after(oracle, optimizer, step.before, step.gradients, step.learning_rates)
            for oracle, optimizer in replays
        )
        for name, value in step.after.items():
            if name not in exact:
                continue  # the subject's own addition to the model: not the job's, so not judged
            before = step.before[name].double()
            unit = rounding_unit([before, exact[name] - before], analysis.epsilon)
            error = replay_error(value, exact[name], replayed[name], unit)
            yield Deviation(error, index, name, analysis.holder(trace.rank, name))


def weights_after(
    oracle: Oracle, optimizer: Optimizers, before: Tensors, gradients: Tensors, learning_rates: tuple[float, ...]
) -> Tensors:
    """Return what one optimizer step makes of weights and gradients, at the subject's learning rates."""
    oracle.load(before)
    oracle.set_gradients(gradients)
    # Whether these rates are right is another check's question; they are ignored where the groups do not correspond.
    if len(learning_rates) == len(optimizer.param_groups):
        for group, rate in zip(optimizer.param_groups, learning_rates, strict=True):
            group["lr"] = rate
    optimizer.step()
    return oracle.weights()
