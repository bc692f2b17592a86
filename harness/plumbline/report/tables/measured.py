"""A run's measurements: the figures of each cell with its conformance, profiles and notes, and a table in long form."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import pandas as pd

from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.report.tables.cells import DECLINED, cached_per_run, cell_table, mark_of
from plumbline.report.tables.run_summary import backend_in_words
from plumbline.report.text import printable
from plumbline.results.records import PERFORMANCE, Coordinates, Measurement, Profile, by_cell, grouped
from plumbline.results.run import PROFILES, Run

EFFICIENCY: Final = ("scaling_strong", "scaling_weak")
"""A workload has one of these: strong if its batch is split over the devices, weak if each device gets a whole one."""

MEMORY: Final = ("memory_allocated_peak", "memory_private_peak")
"""The peak of a GPU's allocator, or of a simulated device's process."""

NOT_EXAMINED: Final = "not examined"
_CELL: Final = ["cell", *Coordinates._fields]
_OF_A_MEASUREMENT: Final = ["metric", "value", "unit", "rank", "low", "high", "better", "refusal"]
METRIC_COLUMNS: Final = ("run", *_CELL, "check", *_OF_A_MEASUREMENT, "conformance")
_CONFIGURATION = ("subject", "backend", "num_nodes", "gpus", "precision", "accelerator", "mesh")
_BAD = tuple(outcome.value for outcome in Outcome if outcome.is_bad)


@dataclass(frozen=True)
class Conformance:
    """The finding on a configuration: one of ``MARKS``, or ``NOT_EXAMINED``. ``wrong``: its speed does not count."""

    mark: str
    wrong: bool
    sentence: str


@dataclass(frozen=True)
class MeasuredCell:
    """One cell with its figures by metric (the worst of several ranks), and reasons why other metrics do not apply."""

    cell: str
    at: Coordinates
    figures: Mapping[str, Measurement]
    conformance: Conformance
    profile: Profile | None = None
    not_applicable: Mapping[str, str] = field(default_factory=dict)

    @property
    def why_wrong(self) -> str | None:
        return self.conformance.sentence if self.conformance.wrong else None

    def first(self, metrics: Iterable[str]) -> Measurement | None:
        return next((self.figures[metric] for metric in metrics if metric in self.figures), None)

    def value(self, metric: str) -> float | None:
        figure = self.figures.get(metric)
        return None if figure is None else figure.value

    def configuration(self, *, several_subjects: bool) -> str:
        """Return what distinguishes the cell from others of its workload: ``ddp 16, 1×4``."""
        place = "" if self.at.backend == "none" else f", {self.at.num_nodes}×{self.at.gpus}"
        return f"{self.series(several_subjects=several_subjects)}{place}"

    def series(self, *, several_subjects: bool) -> str:
        """Return what the cell shares with cells on other numbers of devices: ``ddp 16``."""
        subject = [f"{self.at.subject}:"] if several_subjects else []
        return " ".join([*subject, backend_in_words(self.at.backend), self.at.precision])


def bounds(figure: Measurement) -> tuple[float, float, float]:
    """Return the low bound, the figure and the high bound. A missing bound is the figure, a missing figure is 0."""
    value = figure.value or 0.0
    return value if figure.low is None else figure.low, value, value if figure.high is None else figure.high


def has_several_subjects(cells: Iterable[MeasuredCell]) -> bool:
    return len({cell.at.subject for cell in cells}) > 1


def measured_cells(run: Run) -> list[MeasuredCell]:
    """Return every measured cell: workloads in the order of the run, small topologies first."""
    conformance = conformance_of(run)
    cells = by_cell(run.measurements)
    workloads = list(dict.fromkeys(key.workload for key in cells))
    beside = {one.coordinates: (one.profile, one.not_applicable) for one in run.results if one.check == PERFORMANCE}
    found = []
    for key in sorted(cells, key=lambda key: (workloads.index(key.workload), key.devices, key.num_nodes)):
        metrics = grouped(cells[key], lambda record: record.metric)
        figures = {metric: min(records, key=_represents) for metric, records in metrics.items()}
        found.append(MeasuredCell(cells[key][0].cell, key, figures, conformance(key), *beside.get(key, ())))
    return found


def _represents(one: Measurement) -> tuple[bool, bool, float]:
    value = one.value or 0.0
    return one.rank is not None, one.value is None, value if one.better == "higher" else -value


@cached_per_run
def conformance_of(run: Run) -> Callable[[Coordinates], Conformance]:
    """Return a function from a cell to the conformance of its configuration, over all workloads of the run."""
    cells = cell_table(run)
    tried = cells[~cells["outcome"].isin(DECLINED)]
    found = {}
    for key, own in tried.groupby(list(_CONFIGURATION), sort=False):
        bad = int(own["outcome"].isin(_BAD).sum())
        number = f"{counted(len(own), 'cell')} of this configuration"
        sentence = f"{bad} of {number} went wrong, so its speed does not count"
        found[key] = Conformance(mark_of(own), bad > 0, sentence if bad else f"{number} examined, none went wrong")
    not_examined = Conformance(NOT_EXAMINED, False, "not examined in this run")
    return lambda cell: found.get((cell[0], *cell[2:]), not_examined)


def metrics_table(run: Run) -> pd.DataFrame:
    """Return one row per metric; columns are ``METRIC_COLUMNS``.

    ``error_x_noise`` has one row per cell and check (the largest, whatever the outcome), ``seconds`` (wall time of the
    launch) one row per cell, with an empty check. What was not measured has no row.
    Measurements follow: ``low`` and ``high`` bound a figure with 95 % confidence, ``rank`` is the rank it belongs to,
    ``conformance`` the mark of its configuration in the same run. A refused figure has a reason instead of a value.
    """
    results = pd.DataFrame(
        [(result.cell, *result.coordinates, result.check, result.error_x_noise) for result in run.results],
        columns=[*_CELL, "check", "value"],
    )
    results["value"] = results["value"].astype(float)
    errors = results.dropna(subset="value").groupby([*_CELL, "check"], sort=False, as_index=False).max()
    seconds = cell_table(run).dropna(subset="seconds").rename(columns={"seconds": "value"})
    found = conformance_of(run)
    rows = [
        (one.cell, *one.coordinates, *(getattr(one, name) for name in _OF_A_MEASUREMENT), found(one.coordinates).mark)
        for one in run.measurements
    ]
    measurements = pd.DataFrame(rows, columns=[*_CELL, *_OF_A_MEASUREMENT, "conformance"])
    # A rank is an integer or missing: in a column of floats it would read 0.0.
    types = {"rank": "Int64", "value": "float64", "low": "float64", "high": "float64"}
    table = pd.concat(
        [
            errors.assign(metric="error_x_noise", unit="× noise"),
            seconds.assign(metric="seconds", unit="s", check=""),
            measurements.astype(types).assign(check=""),
        ]
    )
    table.insert(0, "run", run.header.run_id)
    ordered: pd.DataFrame = table.reindex(columns=list(METRIC_COLUMNS)).reset_index(drop=True)
    return ordered


# A run may come from anywhere: only files of this form become links.
_FILE = re.compile(rf"{PROFILES}/(?!\.)[^/\\]+/rank-(\d+)\.(trace\.json\.gz|memory\.pickle)")
_KINDS: Final = {"trace.json.gz": "trace", "memory.pickle": "memory snapshot"}

HOW_TO_OPEN: Final = (
    "Traces open in Perfetto (ui.perfetto.dev) or chrome://tracing, memory snapshots in torch's viewer "
    "(pytorch.org/memory_viz). They come from a separate launch, which is not used for any figure."
)


@dataclass(frozen=True)
class ProfileFile:
    """A file of a profiled launch; ``path`` is relative to the run's folder."""

    name: str
    path: str


def profile_files(profile: Profile | None) -> list[ProfileFile]:
    found = [_FILE.fullmatch(path) for path in (profile.files if profile else ())]
    return [ProfileFile(f"{_KINDS[match[2]]} of rank {match[1]}", match[0]) for match in found if match]


def not_applicable(cells: Iterable[MeasuredCell]) -> dict[str, list[str]]:
    """Return, for each reason, the names in words of the metrics that do not apply to some of ``cells``."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        for metric, reason in cell.not_applicable.items():
            names = reasons.setdefault(printable(reason), [])
            name = metric_in_words(metric)
            if name not in names:
                names.append(name)
    return reasons


def formulas(cells: Iterable[MeasuredCell]) -> dict[str, str]:
    return {
        metric_in_words(metric): printable(figure.formula)
        for cell in cells
        for metric, figure in cell.figures.items()
        if figure.formula
    }


def metric_in_words(metric: str) -> str:
    return printable(metric).replace("_", " ")
