"""The original documentation's claims about speed and memory, and what a run measured for each of them.

A claim is measured by every pair of cells that differ only in what it is about. It holds if, in every such pair, the
95 % interval of the ratio lies on the claimed side of the threshold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pandas as pd

from plumbline.core.precision import PRECISIONS
from plumbline.report.tables.measured import MeasuredCell, bounds, measured_cells
from plumbline.results.fields import XNoise
from plumbline.results.run import Run

NEEDS_A_GPU: Final = "needs a GPU"
NEEDS_A_GPU_EACH: Final = "needs a GPU for each rank"
NEEDS_TENSOR_CORES: Final = "needs tensor cores"
HOLDS, PARTLY, DOES_NOT, OPEN = "yes", "partly", "no", "inconclusive"
NOT_MEASURED: Final = "not measured"
_TENSOR_CORES_SINCE = (7, 0)
"""The compute capability of Volta, the first with tensor cores (NVIDIA, CUDA C++ Programming Guide)."""

_SIXTEEN_BIT = tuple(name for name, precision in PRECISIONS.items() if precision.is_16_bit)
_PLACE = ["subject", "workload", "backend", "num_nodes", "gpus", "precision", "accelerator"]
_FIGURE = ["low", "value", "high", "wrong"]


@dataclass(frozen=True)
class ClaimRatio:
    """One measurement of a claim: ``ratio`` of two cells with its bounds (95 %), and their configuration.

    ``wrong`` says why it does not count: one of the two configurations went wrong. None: it counts.
    """

    ratio: XNoise
    low: XNoise
    high: XNoise
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
        holds = [pair.holds for pair in self.pairs if pair.wrong is None]
        return f"in {holds.count(True)} of {len(holds)} pairs" if holds else ""


@dataclass(frozen=True)
class _Question:
    """The ratio of ``metric`` between cells that differ in ``by``. It should be ``at_most`` this, or else above 1."""

    statement: str
    measure: str
    metric: str
    by: Literal["backend", "precision"]
    first: tuple[str, ...]
    second: str
    at_most: float | None = None
    tensor_cores: bool = False

    def holds(self, low: float, high: float) -> bool | None:
        if self.at_most is not None:
            return True if high <= self.at_most else False if low > self.at_most else None
        return True if low > 1 else False if high <= 1 else None


_QUESTIONS: Final = (
    _Question("ddp is faster than dp", "throughput of ddp ÷ that of dp", "throughput", "backend", ("ddp",), "dp"),
    _Question(
        "16-bit halves the memory",
        "peak of allocated memory in 16-bit ÷ that in 32-bit",
        "memory_allocated_peak",
        "precision",
        _SIXTEEN_BIT,
        "32",
        at_most=0.5,
    ),
    _Question(
        "16-bit is faster on tensor cores",
        "throughput in 16-bit ÷ that in 32-bit",
        "throughput",
        "precision",
        _SIXTEEN_BIT,
        "32",
        tensor_cores=True,
    ),
    _Question(
        "ddp2 costs one gather per step",
        "time of a step with ddp2 ÷ that with ddp",
        "step_p50",
        "backend",
        ("ddp2",),
        "ddp",
    ),
)


def claims(run: Run) -> list[Claim]:
    cells = measured_cells(run)
    found = []
    for question in _QUESTIONS:
        pairs = tuple(_pairs(question, cells))
        found.append(Claim(question.statement, question.measure, _answer(question, run, pairs), pairs))
    return found


def _answer(question: _Question, run: Run, pairs: Sequence[ClaimRatio]) -> str:
    if run.header.simulated or run.header.fingerprint.key.accelerator == "cpu":
        return NEEDS_A_GPU
    if run.header.options.get("oversubscribe"):
        return NEEDS_A_GPU_EACH
    capability = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", run.header.fingerprint.compute_capability or "")
    has_tensor_cores = capability is not None and tuple(map(int, capability.groups())) >= _TENSOR_CORES_SINCE
    if question.tensor_cores and not has_tensor_cores:
        return NEEDS_TENSOR_CORES
    holds = [pair.holds for pair in pairs if pair.wrong is None]
    if not holds:
        return NOT_MEASURED
    if all(holds):
        return HOLDS
    if any(holds):
        return PARTLY
    return DOES_NOT if False in holds else OPEN


def _pairs(question: _Question, cells: Sequence[MeasuredCell]) -> Iterator[ClaimRatio]:
    figures = _figures(question.metric, cells)
    first = figures[figures[question.by].isin(question.first)]
    second = figures[figures[question.by] == question.second]
    shared = [name for name in _PLACE if name != question.by]
    for _, pair in first.merge(second, on=shared, suffixes=("", " of second")).iterrows():
        low, high = pair["low"] / pair["high of second"], pair["high"] / pair["low of second"]
        both = ([pair[name], pair.get(f"{name} of second", pair[name])] for name in ("backend", "precision"))
        backends, precisions = (" over ".join(dict.fromkeys(names)) for names in both)
        yield ClaimRatio(
            pair["value"] / pair["value of second"],
            low,
            high,
            f"{pair['subject']}, {pair['workload']}, {backends}, {pair['num_nodes']}×{pair['gpus']}, {precisions}",
            question.holds(low, high),
            pair["wrong"] or pair["wrong of second"] or None,
        )


def _figures(metric: str, cells: Sequence[MeasuredCell]) -> pd.DataFrame:
    rows = [
        {**cell.at._asdict(), **dict(zip(_FIGURE, (*bounds(cell.figures[metric]), cell.why_wrong or ""), strict=True))}
        for cell in cells
        if cell.value(metric) is not None
    ]
    figures = pd.DataFrame(rows, columns=[*_PLACE, *_FIGURE])
    positive: pd.DataFrame = figures[(figures[["low", "value", "high"]] > 0).all(axis=1)]
    return positive
