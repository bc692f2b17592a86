"""The claims of the original documentation on speed and memory, and what a run measured of each.

A claim is measured by every pair of cells that differ only in what it is about. It holds if, in every such pair, the
95 % interval of the ratio lies on the claimed side of the threshold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from plumbline.core.precision import PRECISIONS
from plumbline.report.tables.measured import MeasuredCell, bounds, measured_cells
from plumbline.results.run import Run

NEEDS_A_GPU: Final = "needs a GPU"
NEEDS_A_GPU_EACH: Final = "needs a GPU for each rank"
NEEDS_TENSOR_CORES: Final = "needs tensor cores"
HOLDS, PARTLY, DOES_NOT, OPEN = "yes", "partly", "no", "inconclusive"
NOT_MEASURED: Final = "not measured"

_TENSOR_CORES_SINCE = (7, 0)
"""The compute capability of Volta, the first with tensor cores (NVIDIA, CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class ClaimRatio:
    """One measurement of a claim: ``ratio`` of two cells with its bounds (95 %), and their configuration.

    ``wrong`` says why it does not count: one of the two configurations went wrong. None: it counts.
    """

    ratio: float
    low: float
    high: float
    conditions: str
    holds: bool | None
    wrong: str | None


@dataclass(frozen=True)
class Claim:
    """A claim, and the run's answer. ``measure`` describes the ratio."""

    statement: str
    measure: str
    answer: str
    pairs: tuple[ClaimRatio, ...]

    @property
    def counted(self) -> str:
        """In how many of the pairs that count the claim holds, in words."""
        holds = [pair.holds for pair in self.pairs if pair.wrong is None]
        return f"in {holds.count(True)} of {len(holds)} pairs" if holds else ""


@dataclass(frozen=True)
class _Question:
    """How a claim is measured: the ratio of ``metric`` in a ``first`` cell to that in a ``second`` one.

    ``same`` is what both cells share. ``holds`` decides from the bounds of the ratio; None means inconclusive.
    """

    statement: str
    measure: str
    metric: str
    first: Callable[[MeasuredCell], bool]
    second: Callable[[MeasuredCell], bool]
    same: Callable[[MeasuredCell], tuple[object, ...]]
    holds: Callable[[float, float], bool | None]
    tensor_cores: bool = False


def _above(threshold: float) -> Callable[[float, float], bool | None]:
    return lambda low, high: True if low > threshold else False if high <= threshold else None


def _below(threshold: float) -> Callable[[float, float], bool | None]:
    return lambda low, high: True if high <= threshold else False if low > threshold else None


def _all_but_backend(cell: MeasuredCell) -> tuple[object, ...]:
    return cell.subject, cell.workload, cell.topology, cell.precision, cell.accelerator


def _all_but_precision(cell: MeasuredCell) -> tuple[object, ...]:
    return cell.subject, cell.workload, cell.topology, cell.backend, cell.accelerator


def _is_16_bit(cell: MeasuredCell) -> bool:
    precision = PRECISIONS.get(cell.precision)
    return precision is not None and precision.is_16_bit


_QUESTIONS: Final = (
    _Question(
        "ddp is faster than dp",
        "throughput of ddp over that of dp",
        "throughput",
        lambda cell: cell.backend == "ddp",
        lambda cell: cell.backend == "dp",
        _all_but_backend,
        _above(1.0),
    ),
    _Question(
        "16-bit halves the memory",
        "peak of allocated memory in 16-bit over that in 32-bit",
        "memory_allocated_peak",
        _is_16_bit,
        lambda cell: cell.precision == "32",
        _all_but_precision,
        _below(0.5),
    ),
    _Question(
        "16-bit is faster on tensor cores",
        "throughput in 16-bit over that in 32-bit",
        "throughput",
        _is_16_bit,
        lambda cell: cell.precision == "32",
        _all_but_precision,
        _above(1.0),
        tensor_cores=True,
    ),
    _Question(
        "ddp2 costs a gather a step",
        "time of a step with ddp2 over that with ddp",
        "step_p50",
        lambda cell: cell.backend == "ddp2",
        lambda cell: cell.backend == "ddp",
        _all_but_backend,
        _above(1.0),
    ),
)


def claims(run: Run) -> list[Claim]:
    """Return the four claims of the original documentation, each with every pair of cells that measures it."""
    cells = measured_cells(run)
    return [_claim(question, run, cells) for question in _QUESTIONS]


def _claim(question: _Question, run: Run, cells: Sequence[MeasuredCell]) -> Claim:
    pairs = tuple(_pairs(question, cells))
    return Claim(question.statement, question.measure, _answer(question, run, pairs), pairs)


def _answer(question: _Question, run: Run, pairs: Sequence[ClaimRatio]) -> str:
    if run.header.simulated or run.header.fingerprint.key.accelerator == "cpu":
        return NEEDS_A_GPU
    if run.header.options.get("oversubscribe"):
        return NEEDS_A_GPU_EACH
    if question.tensor_cores and not _has_tensor_cores(run.header.fingerprint.compute_capability):
        return NEEDS_TENSOR_CORES
    holds = [pair.holds for pair in pairs if pair.wrong is None]
    if not holds:
        return NOT_MEASURED
    if all(holds):
        return HOLDS
    if any(holds):
        return PARTLY
    return DOES_NOT if False in holds else OPEN


def _has_tensor_cores(capability: str | None) -> bool:
    numbers = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", capability or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _TENSOR_CORES_SINCE


def _pairs(question: _Question, cells: Iterable[MeasuredCell]) -> Iterable[ClaimRatio]:
    others: dict[tuple[object, ...], list[MeasuredCell]] = {}
    cells = [cell for cell in cells if cell.value(question.metric) is not None]
    for cell in cells:
        if question.second(cell):
            others.setdefault(question.same(cell), []).append(cell)
    for cell in filter(question.first, cells):
        for other in others.get(question.same(cell), ()):
            if pair := _pair(question, cell, other):
                yield pair


def _pair(question: _Question, cell: MeasuredCell, other: MeasuredCell) -> ClaimRatio | None:
    above, below = bounds(cell.figures[question.metric]), bounds(other.figures[question.metric])
    if min(*above, *below) <= 0:
        return None  # a ratio of 0 or of negative figures means nothing
    ratio, low, high = above[1] / below[1], above[0] / below[2], above[2] / below[0]
    wrong = next((one.conformance.sentence for one in (cell, other) if one.conformance.wrong), None)
    return ClaimRatio(ratio, low, high, _conditions(cell, other), question.holds(low, high), wrong)


def _conditions(cell: MeasuredCell, other: MeasuredCell) -> str:
    nodes, gpus = cell.topology
    precisions = " over ".join(dict.fromkeys((cell.precision, other.precision)))
    backends = " over ".join(dict.fromkeys((cell.backend, other.backend)))
    return f"{cell.subject}, {cell.workload}, {backends}, {nodes}×{gpus}, {precisions}"
