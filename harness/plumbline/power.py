"""The smallest error that the checks detect: known errors are injected into records of right trainings.

A check judges each step separately, from the weights recorded before it. For that check, evidence with a wrong gradient
is therefore what a trainer with this error would have recorded. The error has exactly the requested size, whereas a
trainer's reduction, scaler and cast would round it. Only this check is run, because a trainer would have continued
with its error.

Every rank gets the same error. An error on a single rank shows at any size, because ranks are compared bit for bit.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError, TraceError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.engine.examine import examine
from plumbline.evidence.read import read_trace
from plumbline.evidence.trace import Step, Tensors, Trace
from plumbline.judge.checks.gradients import compare_gradients
from plumbline.judge.checks.update import compare_updates
from plumbline.judge.expected_metrics import LossTable, ReportedValue
from plumbline.judge.oracle.noise import norm
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, behavior_of
from plumbline.launch.pool import Pool
from plumbline.own_workloads.load import use_workloads, workload_of
from plumbline.planning.declaration import Declaration
from plumbline.planning.devices import resolve_accelerator
from plumbline.planning.plan import Matrix, plan
from plumbline.workloads import WORKLOADS

NEGLIGIBLE = 1e-9
"""A tensor with less than this fraction of the largest norm is zero up to rounding, such as a bias before BatchNorm."""


@dataclass(frozen=True)
class Place:
    """Where an error is injected: an optimizer step, and one tensor (in a random direction) or all of them (scaled)."""

    step: int
    parameter: str | None
    seed: int = 0


def gradient_off(trace: Trace, place: Place, size: float) -> Trace:
    def changed(step: Step) -> Step:
        return replace(step, gradients=_off(step.gradients, step.gradients, place, size))

    return _at(trace, place.step, changed)


def update_off(trace: Trace, place: Place, size: float) -> Trace:
    """Return the trace with an update (weights after minus before) that is wrong by ``size`` times its norm."""

    def changed(step: Step) -> Step:
        updates = {name: value.double() - step.before[name].double() for name, value in step.after.items()}
        return replace(step, after=_off(step.after, updates, place, size))

    return _at(trace, place.step, changed)


def places(trace: Trace, count: int, seed: int, *, whole: bool) -> list[Place]:
    draw = random.Random(seed)
    steps = [index for index, step in enumerate(trace.ranks[0].steps) if not step.skipped and step.gradients]
    found = []
    for _ in range(count if steps else 0):
        step = draw.choice(steps)
        lengths = {name: norm(value) for name, value in trace.ranks[0].steps[step].gradients.items()}
        lasting = [name for name, value in lengths.items() if value >= NEGLIGIBLE * max(lengths.values())]
        found.append(Place(step, None if whole else draw.choice(lasting), draw.randrange(2**31)))
    return found


def _at(trace: Trace, index: int, changed: Callable[[Step], Step]) -> Trace:
    ranks = (
        replace(rank, steps=tuple(changed(step) if number == index else step for number, step in enumerate(rank.steps)))
        for rank in trace.ranks
    )
    return replace(trace, ranks=tuple(ranks))


def _off(tensors: Tensors, parts: Tensors, place: Place, size: float) -> Tensors:
    name = place.parameter
    if name is None:
        errors = {name: size * part.double() for name, part in parts.items()}
    else:
        generator = torch.Generator().manual_seed(place.seed)
        direction = torch.randn(tensors[name].shape, dtype=torch.float64, generator=generator)
        errors = {name: direction * (size * norm(parts[name]) / norm(direction))}
    wrong = {name: (tensors[name].double() + error).to(tensors[name].dtype) for name, error in errors.items()}
    return {**tensors, **wrong}


SMALLEST, LARGEST = 1e-18, 1.0
"""The range in which the limit is searched: from below any rounding to as large as the tensor."""

PRECISION = 1.1  # The factor to which a limit is known. Limits of different steps and tensors differ far more.
CAUGHT = 0.99
Limits = Callable[[TraceAnalysis, Trace, int, int], Iterator[float]]
"""Yields the smallest error that is caught in each of ``count`` places of a right training, drawn with a seed."""


def _of_steps(
    inject: Callable[[Trace, Place, float], Trace], compare: Callable[[TraceAnalysis], Finding], *, whole: bool
) -> Limits:
    def limits(analysis: TraceAnalysis, trace: Trace, count: int, seed: int) -> Iterator[float]:
        for place in places(trace, count, seed, whole=whole):

            def is_caught(size: float, place: Place = place) -> bool:
                # Errors change neither the samples nor the weights before a step, so the right values stay the same.
                wrong = inject(trace, place, size)
                other = TraceAnalysis(wrong, analysis.workload, analysis.cell, analysis.behavior)
                other.expected, other.noise = analysis.expected, analysis.noise
                return compare(other).outcome is Outcome.FAILED

            yield smallest(is_caught)

    return limits


def _of_metrics(analysis: TraceAnalysis, trace: Trace, count: int, seed: int) -> Iterator[float]:
    table, draw = LossTable(analysis), random.Random(seed)
    for _ in range(count if table.reports else 0):
        report = draw.choice(table.reports)
        expected = list(table.expected_values(report))

        def is_caught(size: float, report: ReportedValue = report, expected: Sequence[float] = expected) -> bool:
            off = replace(report, value=report.value * (1 + size))
            return not min((table.error(off, value) for value in expected), default=math.inf) <= table.limit

        yield smallest(is_caught)


KINDS: Mapping[str, Limits] = {
    "gradient, all tensors": _of_steps(gradient_off, compare_gradients, whole=True),
    "gradient, one tensor": _of_steps(gradient_off, compare_gradients, whole=False),
    "update, all tensors": _of_steps(update_off, compare_updates, whole=True),
    "update, one tensor": _of_steps(update_off, compare_updates, whole=False),
    "metric": _of_metrics,
}
"""Kinds of errors, with the limits of the check that should detect them."""


def smallest(caught: Callable[[float], bool]) -> float:
    if not caught(LARGEST):
        return math.inf
    low, high = SMALLEST, LARGEST
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if caught(middle) else (middle, high)
    return high


def caught_in_most(found: Sequence[float], share: float = CAUGHT) -> float | None:
    """Return the smallest error that is caught in this share of the runs; None if there are no runs."""
    return sorted(found)[number_of(share, len(found)) - 1] if found else None


def number_of(share: float, runs: int) -> int:
    return math.ceil(share * runs)


def cells_of(
    declared: Sequence[Declaration],
    workload: str,
    gpus: int,
    backends: Sequence[str] | None,
    precisions: Sequence[str] | None,
) -> list[Cell]:
    """Return the subject's cells of a workload, given by name or file; raise ``PlanError`` if there are none."""
    names = (workload,) if workload in WORKLOADS else tuple(own.name for own in use_workloads([workload]))
    matrix = Matrix(
        gpus=gpus,
        workloads=names,
        backends=None if backends is None else tuple(backends),
        precisions=None if precisions is None else tuple(precisions),
        accelerator=resolve_accelerator("auto")[0],
    )
    cells = [one.cell for one in plan(matrix, declared, WORKLOADS) if one.refusal is None]
    if not cells:
        raise PlanError(f"{declared[0].name} has no cell of {workload} on up to {gpus} devices with these options")
    return cells


class NotRightError(Exception):
    """The training is already wrong, so the effect of an added error cannot be measured."""


@dataclass(frozen=True)
class Power:
    """The smallest relative errors that are caught in 99 % (``limit``) and in half of the runs; None without runs."""

    cell: Cell
    kind: str
    runs: int
    limit: float | None
    median: float | None

    @property
    def caught(self) -> int:
        """Runs in which an error as large as the limit is caught."""
        return number_of(CAUGHT, self.runs)


def measure(pool: Pool, cell: Cell, folder: Path, *, runs: int, trainings: int) -> Iterator[Power]:
    """Yield the power for each kind of error, over ``runs`` places in ``trainings`` with different seeds."""
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    for seed in range(trainings):
        seeded = replace(cell, seed=seed)
        try:
            findings = examine(pool, seeded, folder, Settings()).findings
            bad = [one for one in findings if one.outcome.is_bad]
            if bad:
                raise NotRightError(f"{cell.id} with seed {seed}: {bad[0].check}: {bad[0].message}")
            trace = read_trace(folder)
        except TraceError as error:
            raise NotRightError(f"{cell.id} with seed {seed}: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        analysis = TraceAnalysis(trace, workload_of(seeded), seeded, behavior_of(pool, seeded))
        for name, limits in KINDS.items():
            found[name] += limits(analysis, trace, -(-runs // trainings), seed)
    for name, one in found.items():
        yield Power(cell, name, len(one), caught_in_most(one), caught_in_most(one, 0.5))
