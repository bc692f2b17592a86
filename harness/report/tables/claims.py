"""What the old documentation claimed of the trainer, as statements that a run measured or did not.

A statement is measured wherever two cells differ in nothing but what it speaks of. It holds where the interval of
the ratio lies on its side of the border in every such pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from harness.report.tables.figures import Measured, measured_cells
from harness.results.records import Measurement
from harness.results.run import Run

NEEDS_A_GPU: Final = "needs a GPU"
NEEDS_A_GPU_EACH: Final = "needs a GPU for each rank"
NEEDS_TENSOR_CORES: Final = "needs tensor cores"
HOLDS, PARTLY, DOES_NOT, OPEN = "yes", "partly", "no", "cannot be told"
NOT_MEASURED: Final = "not measured"

_TENSOR_CORES_SINCE = (7, 0)
"""The compute capability of Volta, the first with tensor cores (NVIDIA, CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class Pair:
    """One measurement of a claim: ``ratio`` with its bounds (95 %), and under what conditions.

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
    """A claim, and what the run says of it. ``measure`` says what the ratio is of."""

    statement: str
    measure: str
    answer: str
    pairs: tuple[Pair, ...]

    @property
    def counted(self) -> str:
        """In how many of the pairs that count it holds."""
        told = [pair.holds for pair in self.pairs if pair.wrong is None]
        return f"in {told.count(True)} of {len(told)} pairs" if told else ""


@dataclass(frozen=True)
class _Question:
    """``changes``: what the first cell has in place of the second's. ``holds`` judges the bounds of the ratio."""

    statement: str
    measure: str
    metric: str
    first: Callable[[Measured], bool]
    second: Callable[[Measured], bool]
    same: Callable[[Measured], tuple[object, ...]]
    holds: Callable[[float, float], bool | None]
    tensor_cores: bool = False


def _above(border: float) -> Callable[[float, float], bool | None]:
    return lambda low, high: True if low > border else False if high <= border else None


def _below(border: float) -> Callable[[float, float], bool | None]:
    return lambda low, high: True if high <= border else False if low > border else None


def _all_but_backend(cell: Measured) -> tuple[object, ...]:
    return cell.subject, cell.workload, cell.topology, cell.precision, cell.accelerator


def _all_but_precision(cell: Measured) -> tuple[object, ...]:
    return cell.subject, cell.workload, cell.topology, cell.backend, cell.accelerator


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
        lambda cell: cell.precision in ("16", "bf16"),
        lambda cell: cell.precision == "32",
        _all_but_precision,
        _below(0.5),
    ),
    _Question(
        "16-bit is faster on tensor cores",
        "throughput in 16-bit over that in 32-bit",
        "throughput",
        lambda cell: cell.precision in ("16", "bf16"),
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
    """Return the four claims of the old documentation, each with every pair of cells that measured it."""
    cells = measured_cells(run)
    return [_claim(question, run, cells) for question in _QUESTIONS]


def _claim(question: _Question, run: Run, cells: Sequence[Measured]) -> Claim:
    pairs = tuple(_pairs(question, cells))
    return Claim(question.statement, question.measure, _answer(question, run, pairs), pairs)


def _answer(question: _Question, run: Run, pairs: Sequence[Pair]) -> str:
    if run.header.simulated or run.header.fingerprint.key.accelerator == "cpu":
        return NEEDS_A_GPU
    if run.header.options.get("oversubscribe"):
        return NEEDS_A_GPU_EACH
    if question.tensor_cores and not _has_tensor_cores(run.header.fingerprint.compute_capability):
        return NEEDS_TENSOR_CORES
    told = [pair.holds for pair in pairs if pair.wrong is None]
    if not told:
        return NOT_MEASURED
    if all(told):
        return HOLDS
    if any(told):
        return PARTLY
    return DOES_NOT if False in told else OPEN


def _has_tensor_cores(capability: str | None) -> bool:
    numbers = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", capability or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _TENSOR_CORES_SINCE


def _pairs(question: _Question, cells: Iterable[Measured]) -> Iterable[Pair]:
    others: dict[tuple[object, ...], list[Measured]] = {}
    cells = [cell for cell in cells if cell.value(question.metric) is not None]
    for cell in cells:
        if question.second(cell):
            others.setdefault(question.same(cell), []).append(cell)
    for cell in filter(question.first, cells):
        for other in others.get(question.same(cell), ()):
            if pair := _pair(question, cell, other):
                yield pair


def _pair(question: _Question, cell: Measured, other: Measured) -> Pair | None:
    above, below = _bounds(cell.figures[question.metric]), _bounds(other.figures[question.metric])
    if min(*above, *below) <= 0:
        return None  # no ratio
    ratio, low, high = above[1] / below[1], above[0] / below[2], above[2] / below[0]
    wrong = next((one.conformance.sentence for one in (cell, other) if one.conformance.wrong), None)
    return Pair(ratio, low, high, _conditions(cell, other), question.holds(low, high), wrong)


def _bounds(figure: Measurement) -> tuple[float, float, float]:
    """Return a figure between its bounds; one without them is taken at its word."""
    assert figure.value is not None
    low = figure.value if figure.low is None else figure.low
    high = figure.value if figure.high is None else figure.high
    return low, figure.value, high


def _conditions(cell: Measured, other: Measured) -> str:
    nodes, gpus = cell.topology
    precisions = " over ".join(dict.fromkeys((cell.precision, other.precision)))
    backends = " over ".join(dict.fromkeys((cell.backend, other.backend)))
    return f"{cell.subject}, {cell.workload}, {backends}, {nodes}×{gpus}, {precisions}"
