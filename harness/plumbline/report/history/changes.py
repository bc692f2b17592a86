"""What changed from one run to the next: cells that end differently, figures at another level, software, machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from plumbline.core.software import UNKNOWN, Software
from plumbline.report.comparison.significance import POINTS, RATIO
from plumbline.report.history.histories import CellHistory, FigureChange, FigureHistory, Span
from plumbline.report.text import digits
from plumbline.results.errors import ResultsError, RunNotFound
from plumbline.results.header_footer import SubjectCode
from plumbline.results.records import KNOWN, grouped
from plumbline.results.run import RESULTS, Run, read_run

PAGE = "report.html"


@dataclass(frozen=True)
class FoundRuns:
    """Runs in the order in which they were started; ``unreadable`` has why others could not be read."""

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...] = ()


def find_runs(folder: Path) -> FoundRuns:
    """Return every run in ``folder`` or below it; one that lies there twice counts once.

    Raises:
        RunNotFound: there is none that can be read.
    """
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
            f"There is no run in {folder} or below it that can be read: name a folder of runs, for example reports."
            + "".join(f"\n{reason}" for reason in unreadable[:1])
        )
    return FoundRuns(tuple(sorted(runs.values(), key=lambda run: run.header.started)), tuple(unreadable))


def link_to(run: Run, site: Path, folder: Path) -> str | None:
    """Return the address of a run's page from the site's; None where it would lead out of ``folder``, or is not there.

    A site is copied as a whole: addresses are relative, and only lead where its folder goes along.
    """
    page = run.path / PAGE
    inside = site.resolve().is_relative_to(folder.resolve()) and page.is_relative_to(folder.resolve())
    return os.path.relpath(page, site.resolve()).replace(os.sep, "/") if inside and page.is_file() else None


def traits(run: Run, subject: str) -> dict[str, str]:
    """Return what may explain a change of one subject between two runs, by name, the version of its library first."""
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
    """Return the commit of a subject's repository, or else the hash of its source; "" where neither is recorded."""
    code = run.header.code.get(subject, SubjectCode())
    return f"commit {_short(code.commit)}" if code.commit else f"source {_short(code.sha256)}" if code.sha256 else ""


def _short(version: str | None) -> str | None:
    """Return the first digits of a hash or a commit, with a word that follows it: ``0123456789-dirty``."""
    digits, _, word = (version or "").partition("-")
    return "-".join(filter(None, (digits[:10], word))) or None


def label(run: Run, subject: str) -> str:
    """Return what tells a subject's runs apart at a glance: the version of its library, or else of its own code."""
    library = run.header.subjects.get(subject, UNKNOWN).library
    known = traits(run, subject)
    names = (library,) if library not in (None, "torch") else ("commit", "source", "plumbline's commit")
    return next((f"{name} {known[name]}" for name in names if name in known), "")


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name} {before.get(name, 'none')} → {after.get(name, 'none')}" for name in names]


Kind = Literal["worse", "better", "other"]
KINDS: Final[tuple[Kind, ...]] = ("worse", "better", "other")


@dataclass(frozen=True)
class Change:
    """What one or more cells, or one figure, did otherwise than in the run before.

    ``kind`` is ``worse`` where something went wrong or a figure lost, ``better`` where the opposite, else ``other``.
    ``places`` are the names of the rows on the page with their addresses, ``message`` and ``reproduce`` those of the
    first cell, empty where nothing is wrong now.
    """

    kind: Kind
    sentence: str
    places: tuple[tuple[str, str], ...]
    message: str = ""
    reproduce: str = ""


@dataclass(frozen=True)
class Step:
    """Everything that changed in one subject between two runs, what is worse first."""

    subject: str
    before: Run
    run: Run
    changes: tuple[Change, ...]

    @property
    def reasons(self) -> list[str]:
        return differing(traits(self.before, self.subject), traits(self.run, self.subject))


def all_steps(cells: Iterable[CellHistory], figures: Iterable[FigureHistory]) -> list[Step]:
    """Return every change, the newest step first; cells that did the same in a step are one change."""
    found = [
        (cell.subject, before.runs[-1], after.runs[0], _of_cell(cell, before, after))
        for cell in cells
        for before, after in pairwise(cell.spans)
    ]
    found += [
        (figure.subject, figure.points[change.place - 1][0], figure.points[change.place][0], _of_figure(figure, change))
        for figure in figures
        for change in figure.changes
    ]
    steps = grouped(found, lambda one: (one[0], one[1].header.run_id, one[2].header.run_id))
    every = [Step(*ones[0][:3], _together(change for *_, change in ones)) for ones in steps.values()]
    return sorted(every, key=lambda step: step.run.header.started, reverse=True)


def _together(changes: Iterable[Change]) -> tuple[Change, ...]:
    same: dict[tuple[Kind, str], Change] = {}
    for change in changes:
        first = same.setdefault((change.kind, change.sentence), change)
        if first is not change:
            same[change.kind, change.sentence] = replace(first, places=(*first.places, *change.places))
    return tuple(sorted(same.values(), key=lambda change: KINDS.index(change.kind)))


def anchor(*words: object) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(map(str, words)))


def in_words(change: FigureChange) -> str:
    """Return by how much a figure changed, with the interval: ``−12 % (−14 to −10)``."""
    factor = 1.0 if not change.unit else 100.0
    low, high = sorted((change.low, change.high))
    return f"{_signed(change.change * factor)} {change.unit}".rstrip() + (
        f" ({_signed(low * factor)} to {_signed(high * factor)})"
    )


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{digits(abs(value))}"


def _of_cell(cell: CellHistory, before: Span, after: Span) -> Change:
    kind: Kind = "other" if before.end.wrong == after.end.wrong else "worse" if after.end.wrong else "better"
    sentence = f"{before.end} → {after.end}"
    if before.end.cause == after.end.cause is not None and KNOWN in (before.end.outcome, after.end.outcome):
        kind = "other"
        expected = "now expected" if after.end.outcome == KNOWN else "not expected any more"
        sentence = f"{after.end.cause} as before, {expected}"
    told = (after.message, after.reproduce) if after.end.wrong else ()
    return Change(kind, sentence, ((cell.cell, anchor(cell.cell)),), *told)


def _of_figure(figure: FigureHistory, change: FigureChange) -> Change:
    assert change.unit in (RATIO.unit, POINTS.unit, "")
    kind: Kind = "other" if change.worse is None else "worse" if change.worse else "better"
    rank = "" if figure.rank is None else f" of rank {figure.rank}"
    address = anchor(figure.cell, figure.metric, *([] if figure.rank is None else [figure.rank]))
    sentence = f"{figure.metric.replace('_', ' ')}{rank} {in_words(change)}"
    return Change(kind, sentence, ((figure.cell, address),))


def counts(steps: Iterable[Step]) -> dict[Kind, int]:
    every = [change for step in steps for change in step.changes]
    return {kind: sum(len(change.places) for change in every if change.kind == kind) for kind in KINDS}
