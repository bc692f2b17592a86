"""The history of each cell and figure over many runs, and what else changed when it changed: software, machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from plumbline.core.finding import UNEXPLAINED, in_reading_order, is_unexplained
from plumbline.core.outcome import Outcome
from plumbline.core.software import UNKNOWN, Software
from plumbline.machine.fingerprint import ComparabilityKey
from plumbline.report.comparison.figure_changes import MINIMUM_EFFECT, scale_of
from plumbline.report.tables.cells import DECLINED
from plumbline.report.tables.failures import is_wrong
from plumbline.report.text import digits, shortened
from plumbline.results.files import ResultsError, RunNotFound
from plumbline.results.header_footer import SubjectCode
from plumbline.results.records import KNOWN, UNEXPECTED_PASS, Coordinates, Measurement, Result, ending, grouped
from plumbline.results.run import RESULTS, Run, read_run
from plumbline.statistics.change_points import ChangePoint, Series, change_points

LONGEST_MESSAGE: Final = 600


@dataclass(frozen=True)
class CellOutcome:
    """How a cell ended: its outcome, the cause if known, and whether it needs action."""

    outcome: str
    cause: str | None
    wrong: bool

    def __str__(self) -> str:
        words = "known failure" if self.outcome == KNOWN else self.outcome.replace("_", " ")
        cause = self.cause or (UNEXPLAINED if self.outcome == Outcome.FAILED.value else "")
        return f"{words}: {cause}" if cause else words


@dataclass(frozen=True)
class Span:
    """Consecutive runs in which a cell ended the same way; message and command are from the first finding."""

    end: CellOutcome
    runs: tuple[Run, ...]
    message: str
    reproduce: str


@dataclass(frozen=True)
class CellHistory:
    """The spans of one cell, oldest first."""

    cell: str
    subject: str
    spans: tuple[Span, ...]

    @property
    def now(self) -> Span:
        return self.spans[-1]


def cell_histories(runs: Sequence[Run]) -> list[CellHistory]:
    """Return the history of each cell over ``runs``, oldest first. A run counts if it has all findings of the cell."""
    cells: dict[Coordinates, list[Span]] = {}
    names: dict[Coordinates, str] = {}
    for run in runs:
        for coordinates, results in run.whole.items():
            ordered = in_reading_order(results)
            end, spans = _end(ordered), cells.setdefault(coordinates, [])
            names[coordinates] = ordered[0].cell
            if spans and spans[-1].end == end:
                last = spans[-1]
                spans[-1] = replace(last, runs=(*last.runs, run))
            else:
                message = shortened(ordered[0].message.partition("\n")[0], LONGEST_MESSAGE)
                spans.append(Span(end, (run,), message, ordered[0].reproduce))
    return [CellHistory(names[key], key.subject, tuple(spans)) for key, spans in cells.items()]


def is_examined(history: CellHistory) -> bool:
    return history.now.end.outcome not in DECLINED


def _end(results: Sequence[Result]) -> CellOutcome:
    end = ending(results)
    outcome = str(end)
    first = next((result for result in results if is_wrong(result)), None)
    if first is None and outcome == KNOWN:
        first = next(result for result in results if result.is_known)
    cause = None if first is None or is_unexplained(first) else first.cause
    is_bad = isinstance(end, Outcome) and end.is_bad
    return CellOutcome(outcome, cause, outcome == UNEXPECTED_PASS or is_bad)


Key = tuple[Coordinates, str, "int | None", str, ComparabilityKey]


@dataclass(frozen=True)
class LevelChange:
    """The level of a figure from point ``index`` on; ``worse`` is None where neither direction is better."""

    index: int
    change: float
    low: float
    high: float
    unit: str
    worse: bool | None


@dataclass(frozen=True)
class FigureHistory:
    """One figure of one cell on one machine: its measurements, oldest first, each with its run, and its changes."""

    cell: str
    subject: str
    metric: str
    rank: int | None
    machine: ComparabilityKey
    points: tuple[tuple[Run, Measurement], ...]
    changes: tuple[LevelChange, ...]


def figure_histories(runs: Sequence[Run]) -> list[FigureHistory]:
    """Return the history of each figure that has a value, with its changes. All figures are one family of tests."""
    found: dict[Key, list[tuple[Run, Measurement]]] = {}
    for run in runs:
        for one in run.measurements:
            if one.value is not None and one.samples:
                key = (one.coordinates, one.metric, one.rank, one.workload_key, run.header.fingerprint.key)
                found.setdefault(key, []).append((run, one))
    every = list(found.values())
    series = [_series(points) for points in every]
    return [
        FigureHistory(
            points[0][1].cell, key[0].subject, key[1], key[2], key[4], tuple(points),
            tuple(_change(points[0][1], point) for point in changes),
        )
        for key, points, changes in zip(found, every, change_points(series), strict=True)
    ]  # fmt: skip


def _change(one: Measurement, point: ChangePoint) -> LevelChange:
    scale, mean = scale_of(one.unit), point.difference.mean
    change, low, high = map(scale.change, (mean, *point.difference.interval))
    worse = None if one.better is None else (mean < 0) is (one.better == "higher")
    return LevelChange(point.index, change, low, high, scale.unit, worse)


def _series(points: Sequence[tuple[Run, Measurement]]) -> Series:
    scale = scale_of(points[0][1].unit)
    if scale.positive and any(sample <= 0 for _, one in points for sample in one.samples):
        return Series((), 0.0)  # such a sample has no logarithm, so changes are no ratios
    runs = [[scale.onto(sample) for sample in one.samples] for _, one in points]
    return Series(runs, scale.least(MINIMUM_EFFECT))


PAGE = "report.html"


@dataclass(frozen=True)
class FoundRuns:
    """Runs in the order in which they were started. ``unreadable`` says why others could not be read."""

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...] = ()


def find_runs(folder: Path) -> FoundRuns:
    """Return every run in ``folder`` or below it, each once; raise ``RunNotFound`` if none can be read."""
    runs: dict[str, Run] = {}
    unreadable: list[str] = []
    for file in sorted(folder.glob(f"**/{RESULTS}")):
        if file.parent.is_symlink():
            continue
        try:
            run = read_run(file.parent)
        except ResultsError as error:
            unreadable.append(str(error))
        else:
            runs.setdefault(run.header.run_id, run)
    if not runs:
        raise RunNotFound(
            f"There is no readable run in {folder} or below it: name a folder of runs, for example reports."
            + "".join(f"\n{reason}" for reason in unreadable[:1])
        )
    return FoundRuns(tuple(sorted(runs.values(), key=lambda run: run.header.started)), tuple(unreadable))


def link_to(run: Run, site: Path, folder: Path) -> str | None:
    """Return the relative address of a run's page; None if it would lead out of ``folder`` or there is no page."""
    page = run.path / PAGE
    inside = site.resolve().is_relative_to(folder.resolve()) and page.is_relative_to(folder.resolve())
    return os.path.relpath(page, site.resolve()).replace(os.sep, "/") if inside and page.is_file() else None


def traits(run: Run, subject: str) -> dict[str, str]:
    """Return facts by name that can explain a change of a subject between runs, the version of its library first."""
    header, fingerprint = run.header, run.header.fingerprint
    key = fingerprint.key
    devices = f"{key.device_count} devices" if key.device_count else None
    machine = ", ".join(filter(None, [key.device, devices]))
    software = header.subjects.get(subject, Software(torch=fingerprint.torch, python=fingerprint.python))
    code = header.code.get(subject, SubjectCode())
    found = {
        software.library or "library": software.version,
        "commit": _short(code.commit),
        "source": _short(code.sha256),
        **{f"source of workload {name}": _short(source.sha256) for name, source in header.workloads.items()},
        "torch": software.torch,
        "python": software.python,
        "seed": None if header.options.get("seed") is None else str(header.options["seed"]),
        "plumbline": header.plumbline,
        "plumbline's commit": _short(fingerprint.commit),
        "machine": machine,
        "cores": key.cpu_cores and str(key.cpu_cores),
        "driver": key.driver,
        "platform": fingerprint.platform,
        **fingerprint.environment,
    }
    every = {**fingerprint.packages, **found}  # a subject may have packages of its own, in another environment
    return {name: value for name in (*found, *fingerprint.packages) if (value := every[name])}


def own_code(run: Run, subject: str) -> str:
    """Return the commit of a subject's repository, or else the hash of its source; "" if neither is recorded."""
    code = run.header.code.get(subject, SubjectCode())
    return f"commit {_short(code.commit)}" if code.commit else f"source {_short(code.sha256)}" if code.sha256 else ""


def _short(version: str | None) -> str | None:
    digits, _, word = (version or "").partition("-")
    return "-".join(filter(None, (digits[:10], word))) or None


def label(run: Run, subject: str) -> str:
    """Return what tells a subject's runs apart at a glance: the version of its library, or else of its own code."""
    library = run.header.subjects.get(subject, UNKNOWN).library
    known = traits(run, subject)
    names = (library,) if library not in (None, "torch") else ("commit", "source", "plumbline's commit")
    return next((f"{name} {known[name]}" for name in names if name in known), "")


Kind = Literal["worse", "better", "other"]
KINDS: Final[tuple[Kind, ...]] = ("worse", "better", "other")


@dataclass(frozen=True)
class Change:
    """A change of one or more cells, or of one figure, since the run before.

    ``kind`` is ``worse`` if something went wrong or a figure became worse, ``better`` for the opposite, else ``other``.
    ``places`` are the names of the rows on the page with their addresses. ``message`` and ``reproduce`` are from the
    first cell, and empty if nothing is wrong now.
    """

    kind: Kind
    sentence: str
    places: tuple[tuple[str, str], ...]
    message: str = ""
    reproduce: str = ""


@dataclass(frozen=True)
class Step:
    """Everything that changed in one subject between two runs, worse changes first."""

    subject: str
    before: Run
    run: Run
    changes: tuple[Change, ...]

    @property
    def reasons(self) -> list[str]:
        before, after = traits(self.before, self.subject), traits(self.run, self.subject)
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return [f"{name} {before.get(name, 'none')} → {after.get(name, 'none')}" for name in names]


def all_steps(cells: Iterable[CellHistory], figures: Iterable[FigureHistory]) -> list[Step]:
    """Return all steps, newest first. Cells that changed in the same way in a step are one change."""
    found = [
        (cell.subject, before.runs[-1], after.runs[0], _of_cell(cell, before, after))
        for cell in cells
        for before, after in pairwise(cell.spans)
    ]
    found += [
        (figure.subject, figure.points[change.index - 1][0], figure.points[change.index][0], _of_figure(figure, change))
        for figure in figures
        for change in figure.changes
    ]
    steps = grouped(found, lambda one: (one[0], one[1].header.run_id, one[2].header.run_id))
    every = []
    for ones in steps.values():
        same = grouped((change for *_, change in ones), lambda change: (change.kind, change.sentence))
        changes = [replace(own[0], places=tuple(place for one in own for place in one.places)) for own in same.values()]
        every.append(Step(*ones[0][:3], tuple(sorted(changes, key=lambda change: KINDS.index(change.kind)))))
    return sorted(every, key=lambda step: step.run.header.started, reverse=True)


def _of_cell(cell: CellHistory, before: Span, after: Span) -> Change:
    kind: Kind = "other" if before.end.wrong == after.end.wrong else "worse" if after.end.wrong else "better"
    sentence = f"{before.end} → {after.end}"
    if before.end.cause == after.end.cause is not None and KNOWN in (before.end.outcome, after.end.outcome):
        kind = "other"
        expected = "now expected" if after.end.outcome == KNOWN else "no longer expected"
        sentence = f"{after.end.cause} as before, {expected}"
    told = (after.message, after.reproduce) if after.end.wrong else ()
    return Change(kind, sentence, ((cell.cell, anchor(cell.cell)),), *told)


def _of_figure(figure: FigureHistory, change: LevelChange) -> Change:
    kind: Kind = "other" if change.worse is None else "worse" if change.worse else "better"
    rank = [] if figure.rank is None else [figure.rank]
    of = f" of rank {figure.rank}" if rank else ""
    sentence = f"{figure.metric.replace('_', ' ')}{of} {in_words(change)}"
    return Change(kind, sentence, ((figure.cell, anchor(figure.cell, figure.metric, *rank)),))


def anchor(*words: object) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(map(str, words)))


def in_words(change: LevelChange) -> str:
    factor = 1.0 if not change.unit else 100.0
    values = (change.change, *sorted((change.low, change.high)))
    change_, low, high = (f"{'−' if one < 0 else '+'}{digits(abs(one * factor))}" for one in values)
    return f"{change_} {change.unit}".rstrip() + f" ({low} to {high})"


def counts(steps: Iterable[Step]) -> dict[Kind, int]:
    every = [change for step in steps for change in step.changes]
    return {kind: sum(len(change.places) for change in every if change.kind == kind) for kind in KINDS}
