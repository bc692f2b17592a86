"""Profiles, formulas, and metrics that do not apply: what a page shows beside the figures of a measured cell."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from plumbline.report.tables.measured import MeasuredCell
from plumbline.report.text import printable
from plumbline.results.records import Profile
from plumbline.results.run import PROFILES

# A run may come from anywhere: only files of this form become links.
_FILE = re.compile(rf"{PROFILES}/(?!\.)[^/\\]+/rank-(\d+)\.(trace\.json\.gz|memory\.pickle)")
_KINDS: Final = {"trace.json.gz": "trace", "memory.pickle": "memory snapshot"}

HOW_TO_OPEN: Final = (
    "Traces open in Perfetto (ui.perfetto.dev) or chrome://tracing, memory snapshots in torch's viewer "
    "(pytorch.org/memory_viz). They come from a launch of their own; the figures do not."
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
    """Return for each reason the metrics that do not apply to some of ``cells``, by their names for readers."""
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
