"""A run's measurements, a configuration of a workload at a time, and whether its speed is worth anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from harness.core.outcome import Outcome
from harness.report.tables.cache import once_for_a_run
from harness.report.tables.cells import DECLINED, cell_table
from harness.report.tables.support import mark
from harness.results.records import Coordinates, Measurement
from harness.results.run import Run

EFFICIENCY: Final = ("scaling_strong", "scaling_weak")
"""Of these a workload has one: its batch is shared out, or each device has as much as one alone."""

MEMORY: Final = ("memory_allocated_peak", "memory_private_peak")
"""The peak of a GPU's allocator, or of a simulated device's process."""

NOT_EXAMINED: Final = "not examined"
_CONFIGURATION = ("subject", "backend", "num_nodes", "gpus", "precision", "accelerator")
_BAD = tuple(outcome.value for outcome in Outcome if outcome.is_bad)


@dataclass(frozen=True)
class Conformance:
    """What the same run says of the correctness of a configuration.

    ``mark`` is one of ``MARKS``, or ``not examined``. ``wrong``: a cell of it is bad, so that its speed is no speed.
    """

    mark: str
    wrong: bool
    sentence: str


@dataclass(frozen=True)
class Measured:
    """One cell that was measured, with its figures by the name of the metric.

    A metric that speaks of single ranks stands for the worst of them.
    """

    cell: str
    coordinates: Coordinates
    figures: Mapping[str, Measurement]
    conformance: Conformance

    @property
    def subject(self) -> str:
        """The trainer."""
        return self.coordinates[0]

    @property
    def workload(self) -> str:
        """What was trained."""
        return self.coordinates[1]

    @property
    def backend(self) -> str:
        """The trainer's backend."""
        return self.coordinates[2]

    @property
    def topology(self) -> tuple[int, int]:
        """Nodes, and devices of each."""
        return self.coordinates[3], self.coordinates[4]

    @property
    def devices(self) -> int:
        """Devices over all nodes."""
        return self.coordinates[3] * self.coordinates[4]

    @property
    def precision(self) -> str:
        """What it computed in."""
        return self.coordinates[5]

    @property
    def accelerator(self) -> str:
        """What computed."""
        return self.coordinates[6]

    def first(self, metrics: Iterable[str]) -> Measurement | None:
        """Return the first of these figures that there is."""
        return next((self.figures[metric] for metric in metrics if metric in self.figures), None)

    def value(self, metric: str) -> float | None:
        """Return a figure, None where there is none."""
        figure = self.figures.get(metric)
        return None if figure is None else figure.value


def measured_cells(run: Run) -> list[Measured]:
    """Return every measured cell, as planned: workloads in the order of the run, small topologies first."""
    conformance = conformance_of(run)
    cells: dict[Coordinates, list[Measurement]] = {}
    for record in run.measurements:
        cells.setdefault(record.coordinates, []).append(record)
    workloads = list(dict.fromkeys(key[1] for key in cells))
    return [
        Measured(
            cells[key][0].cell,
            key,
            _figures(cells[key]),
            conformance(key),
        )
        for key in sorted(cells, key=lambda key: (workloads.index(key[1]), key[3] * key[4], key[3]))
    ]


def _figures(records: Iterable[Measurement]) -> dict[str, Measurement]:
    worst: dict[str, Measurement] = {}
    for record in records:
        if record.metric not in worst or _is_worse(record, worst[record.metric]):
            worst[record.metric] = record
    return worst


def _is_worse(one: Measurement, other: Measurement) -> bool:
    """Say whether ``one`` is to stand for both: what speaks of all ranks before what speaks of one."""
    if (one.rank is None) != (other.rank is None):
        return one.rank is None
    if one.value is None or other.value is None:
        return other.value is None and one.value is not None
    return one.value < other.value if one.better == "higher" else one.value > other.value


@once_for_a_run
def conformance_of(run: Run) -> Callable[[Coordinates], Conformance]:
    """Return what says of a cell's configuration, whatever the workload, how it was found in the same run."""
    table = cell_table(run)
    tried = table[~table["outcome"].isin(DECLINED)]
    found = {
        key: _judged(list(behind["outcome"]), has_failed=bool(behind["has_failed"].any()))
        for key, behind in tried.groupby(list(_CONFIGURATION), sort=False)
    }
    nobody_looked = Conformance(NOT_EXAMINED, False, "not examined in this run")
    return lambda cell: found.get((cell[0], *cell[2:]), nobody_looked)


def _judged(outcomes: list[str], *, has_failed: bool) -> Conformance:
    bad = sum(outcome in _BAD for outcome in outcomes)
    shown = mark(outcomes, has_failed=has_failed)
    cells = f"{len(outcomes)} cells" if len(outcomes) > 1 else "1 cell"
    if bad:
        sentence = f"{bad} of {cells} of this configuration went wrong: fast and wrong is not supported"
        return Conformance(shown, True, sentence)
    return Conformance(shown, False, f"{cells} of this configuration examined, none went wrong")
