"""``report.html``: one file that works offline, and can be read without its script."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import groupby
from typing import Any, Final

from jinja2 import Environment

from plumbline.report.formats import ReportFormat
from plumbline.report.html.charts import (
    MEMORY_PARTS,
    STEP_SHARES,
    BarChart,
    CurveChart,
    curve_charts,
    distribution_chart,
    memory_chart,
    share_chart,
)
from plumbline.report.html.environment import page_environment
from plumbline.report.html.pictures import (
    HeatMap,
    PipelineTimeline,
    RankPaths,
    heat_map,
    pipeline_timelines,
    rank_paths,
)
from plumbline.report.tables import failures as finding_texts
from plumbline.report.tables import run_summary
from plumbline.report.tables.cells import cell_table
from plumbline.report.tables.claims import claims
from plumbline.report.tables.diagnosis import Diagnosis, diagnoses
from plumbline.report.tables.failures import known_failures, nothing_went_wrong, parameter_rows, subject_causes
from plumbline.report.tables.grid import GridCell, anchors, grids
from plumbline.report.tables.measured import (
    HOW_TO_OPEN,
    MeasuredCell,
    formulas,
    has_several_subjects,
    measured_cells,
    not_applicable,
    profile_files,
)
from plumbline.report.tables.support import IN_A_WORD, MARKS, ROW_COLUMNS, side_by_side, undeclared_rows
from plumbline.report.text import between, location, names_itself
from plumbline.results.files import log_tails
from plumbline.results.run import Run

SIGNS: Final = {"Y": "✓", "C": "≈", "K": "K", "N": "✗", "X": "!", "?": "?", "-": "–"}
"""The sign of each of ``MARKS`` on a page with colours."""

_KIND: Final = {"Y": "good", "C": "contract", "K": "known", "N": "bad", "X": "bad", "?": "open", "-": "none"}
MOST_GROUPS = 40
MOST_FAILURES = 100
MOST_PICTURED = 20
MOST_IN_FULL = 600
MOST_FACETS = 12
MOST_PAIRS = 60
MOST_LOG_TEXT = 400_000
"""Characters of logs on one page; logs beyond that are only in ``traces/``."""

_METRICS: Final = (
    "throughput",
    "throughput_per_gpu",
    "scaling_strong",
    "scaling_weak",
    "step_p50",
    "step_p95",
    "step_first",
    "data_wait",
    "communication",
    "pipeline_bubble",
    "rank_skew",
    "overhead",
    "memory_allocated_peak",
    "memory_reserved_peak",
    "memory_private_peak",
)
"""The order of the columns of figures; other metrics follow."""


@dataclass(frozen=True)
class WorkloadFigures:
    """One workload's charts and table: ``units`` of its metrics, and the cells for each reason of a refused figure."""

    name: str
    curves: tuple[CurveChart, ...]
    steps: BarChart | None
    memory: BarChart | None
    shares: BarChart | None
    pipelines: tuple[PipelineTimeline, ...]
    units: dict[str, str]
    refusals: dict[tuple[str, str], list[MeasuredCell]]
    cells: tuple[MeasuredCell, ...]

    @property
    def profiled(self) -> tuple[MeasuredCell, ...]:
        return tuple(cell for cell in self.cells if cell.profile is not None)

    @property
    def has_peaks(self) -> bool:
        return self.memory is not None and any(bar.mark is not None for bar in self.memory.bars)


def report_page(run: Run) -> str:
    cells = cell_table(run)
    subjects = grids(run)
    measured = measured_cells(run)
    by = run_summary.computed_by(run)
    workloads = list(_workloads(measured))
    wrong = diagnoses(run)
    values: dict[str, Any] = {
        "run": run,
        "verdict": run_summary.verdict_of(run, cells),
        "simulated": run_summary.SIMULATED in by,
        "devices": [name for name in by if name != run_summary.SIMULATED],
        "missing": run_summary.what_is_missing(run, cells),
        "notes": run_summary.notes(run),
        "facts": run_summary.facts(run).items(),
        "contents": _contents(bool(subjects), bool(subjects or wrong), bool(workloads)),
        "grids": subjects,
        "side_by_side": side_by_side(run),
        "kind": _KIND,
        "sign": SIGNS,
        "words": IN_A_WORD,
        "marks": MARKS.items(),
        "micro_batches": run_summary.micro_batches_in_words(run),
        "seed": run_summary.seed_in_words(run),
        "logs_of": _Logs(run).of,
        "in_full": _InFull(len(cells)).shows,
        "diagnoses": wrong,
        "several_wrong": len({one.group.subject for one in wrong}) > 1,
        "drawn_of": _drawn,
        "facets": _facets(wrong),
        "undeclared_rows": undeclared_rows(run),
        "script_hash": _script_hash(),
        "summaries": subject_causes(run),
        "known": known_failures(run),
        "nothing_went_wrong": nothing_went_wrong(run),
        "anchor_of": lambda finding: anchors(run).get(finding.coordinates),
        "workloads": workloads,
        "several_subjects": has_several_subjects(measured),
        "memory_parts": MEMORY_PARTS.values(),
        "step_shares": STEP_SHARES.values(),
        "how_to_open": HOW_TO_OPEN,
        "claims": claims(run) if workloads else (),
        "comparability": run_summary.comparability(run.header.fingerprint).items(),
        "other_facts": run_summary.other_facts(run).items(),
        "packages": run.header.fingerprint.packages.items(),
        "most_groups": MOST_GROUPS,
        "most_failures": MOST_FAILURES,
        "most_pairs": MOST_PAIRS,
        "most_pictured": MOST_PICTURED,
    }
    return _environment().get_template("report.html.jinja").render(values)


def _contents(has_grid: bool, has_wrong: bool, has_figures: bool) -> Iterator[tuple[str, str]]:
    if has_wrong:
        yield "wrong", "What went wrong"
    if has_grid:
        yield "support", "Support"
    if has_figures:
        yield "figures", "Speed and memory"
        yield "claims", "Claims"
    yield "environment", "Environment"
    yield "method", "Method and limits"


@dataclass(frozen=True)
class DrawnCause:
    """The pictures of one cause: errors of a wrong and of a right cell, and the path of a gradient."""

    wrong: HeatMap | None
    right: HeatMap | None
    paths: RankPaths | None


def _drawn(one: Diagnosis) -> DrawnCause | None:
    wrong, paths = heat_map(one.finding, wrong=True), rank_paths(one.finding.rank_shares)
    right = heat_map(one.right, wrong=False) if one.right else None
    return DrawnCause(wrong, right, paths) if wrong or paths else None


def _facets(wrong: Sequence[Diagnosis]) -> list[str]:
    families = dict.fromkeys(one.group.family for one in wrong if one.group.family)
    subjects = dict.fromkeys(one.group.subject for one in wrong)
    words = [*(families if len(families) > 1 else ()), *(subjects if len(subjects) > 1 else ())]
    return words[:MOST_FACETS]


@cache
def _script_hash() -> str:
    """Return the hash of the page's script, the only one that a browser may run in it."""
    script = _environment().get_template("find.js").render()
    return b64encode(sha256(script.encode()).digest()).decode()


def _workloads(measured: Sequence[MeasuredCell]) -> Iterator[WorkloadFigures]:
    for name, group in groupby(measured, key=lambda cell: cell.at.workload):
        cells = tuple(group)
        units = {metric: figure.unit for cell in cells for metric, figure in cell.figures.items()}
        metrics = [*(metric for metric in _METRICS if metric in units), *(m for m in units if m not in _METRICS)]
        refusals: dict[tuple[str, str], list[MeasuredCell]] = {}
        for cell in cells:
            for metric, figure in cell.figures.items():
                if figure.value is None:
                    refusals.setdefault((metric, figure.refusal or "not measured"), []).append(cell)
        yield WorkloadFigures(
            name,
            (
                *curve_charts(f"Throughput, {units.get('throughput', '')}", "throughput", cells),
                *curve_charts(
                    "Strong scaling efficiency: the same work on more devices", "scaling_strong", cells, ideal=1.0
                ),
                *curve_charts(
                    "Weak scaling efficiency: the same work for each device", "scaling_weak", cells, ideal=1.0
                ),
            ),
            distribution_chart(cells),
            memory_chart(cells),
            share_chart(cells),
            tuple(pipeline_timelines(cells)),
            {metric: units[metric] for metric in metrics},
            refusals,
            cells,
        )


class _InFull:
    """Which cells a page shows with all that is known of them: all of a small run, else the first wrong ones.

    The others have one line each: a page of thousands of cells should open in a moment.
    """

    def __init__(self, cells: int) -> None:
        self._room: float = math.inf if cells <= MOST_IN_FULL else MOST_IN_FULL
        self._only_wrong = cells > MOST_IN_FULL

    def shows(self, cell: GridCell) -> bool:
        if self._only_wrong and not cell.bad:
            return False
        self._room -= 1
        return self._room >= 0


class _Logs:
    """The last lines of ranks' logs, at most ``MOST_LOG_TEXT`` characters on a page."""

    def __init__(self, run: Run) -> None:
        self._path = run.path
        self._room = MOST_LOG_TEXT

    def of(self, cell: GridCell) -> list[tuple[str, str]]:
        if not (cell.bad or cell.known or cell.others) or self._room <= 0:
            return []
        shown = log_tails(self._path, cell.cell)
        self._room -= sum(len(tail) for _, tail in shown)
        return shown


def _is_link(text: str) -> bool:
    return text.startswith(("https://", "http://"))


@cache
def _environment() -> Environment:
    environment = page_environment()
    environment.filters |= {
        "as_consequence": finding_texts.as_consequence,
        "between": between,
        "expectation_details": finding_texts.expectation_details,
        "is_link": _is_link,
        "location": location,
        "message_of": finding_texts.message_of,
        "formulas": formulas,
        "names_itself": names_itself,
        "not_applicable": not_applicable,
        "profile_files": profile_files,
        "outcome_in_words": finding_texts.outcome_in_words,
        "parameter_rows": lambda finding: parameter_rows(list(finding.parameters.items()), finding.limit_x_noise),
    }
    environment.globals["backend_in_words"] = run_summary.backend_in_words
    environment.globals["row_columns"] = len(ROW_COLUMNS)
    return environment


FORMAT = ReportFormat("the whole page", report_page, {"report.html": report_page})
