"""``report.html``: one file that works offline and without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.report.html.charts import (
    MEMORY_PARTS,
    BarChart,
    CurveChart,
    configuration_of,
    curve_charts,
    distribution_chart,
    memory_chart,
)
from harness.report.html.scales import between, digits, in_words, names_itself
from harness.report.tables.cells import cell_table
from harness.report.tables.claims import claims
from harness.report.tables.failures import as_consequence, failures, known_failures, outcome_in_words, what_it_says
from harness.report.tables.figures import Measured, measured_cells
from harness.report.tables.grid import GridCell, grids
from harness.report.tables.headline import verdict_of
from harness.report.tables.parameters import parameter_rows
from harness.report.tables.run_facts import backend_in_words, comparability, facts, record, seed_in_words
from harness.report.tables.side_by_side import ROW_COLUMNS, side_by_side
from harness.report.tables.subject_causes import subject_causes
from harness.report.tables.summary import SIMULATED, computed_by, notes, what_is_missing
from harness.report.tables.support import IN_A_WORD, MARKS
from harness.report.text import compact, printable_lines, shortened
from harness.results.logs import log_tails
from harness.results.run import Run

SIGNS: Final = {"Y": "✓", "C": "≈", "K": "K", "N": "✗", "X": "!", "?": "?", "-": "–"}
"""What stands for each of ``MARKS`` where there is colour besides."""

_KIND: Final = {"Y": "good", "C": "contract", "K": "known", "N": "bad", "X": "bad", "?": "open", "-": "none"}
MOST_GROUPS = 40
MOST_FAILURES = 100
MOST_PAIRS = 60
MOST_LOG_TEXT = 400_000
"""Characters of logs on one page; what does not fit stays in ``traces/``."""

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
    "rank_skew",
    "overhead",
    "memory_allocated_peak",
    "memory_reserved_peak",
    "memory_private_peak",
)
"""The order in which figures are read; others follow."""


@dataclass(frozen=True)
class Workload:
    """One workload's charts and its table: ``units`` of its metrics, and why figures were refused, with their cells."""

    name: str
    curves: tuple[CurveChart, ...]
    steps: BarChart | None
    memory: BarChart | None
    units: dict[str, str]
    refusals: dict[tuple[str, str], list[Measured]]
    cells: tuple[Measured, ...]

    @property
    def has_peaks(self) -> bool:
        """Whether an allocator's peak is marked beside what fills the memory."""
        return self.memory is not None and any(bar.mark is not None for bar in self.memory.bars)


def report_page(run: Run) -> str:
    """Return the whole page."""
    cells = cell_table(run)
    subjects = grids(run)
    anchors = {cell.coordinates: cell.anchor for grid in subjects for row in grid.rows for cell in row.cells}
    measured = measured_cells(run)
    by = computed_by(run)
    workloads = list(_workloads(measured))
    wrong = failures(run)
    values: dict[str, Any] = {
        "run": run,
        "verdict": verdict_of(run, cells),
        "simulated": SIMULATED in by,
        "devices": [name for name in by if name != SIMULATED],
        "missing": what_is_missing(run, cells),
        "notes": notes(run),
        "facts": facts(run).items(),
        "contents": _contents(bool(subjects), bool(subjects or wrong), bool(workloads)),
        "grids": subjects,
        "side_by_side": side_by_side(run),
        "kind": _KIND,
        "sign": SIGNS,
        "words": IN_A_WORD,
        "marks": MARKS.items(),
        "seed": seed_in_words(run),
        "logs_of": _Logs(run).of,
        "groups": wrong,
        "summaries": subject_causes(run),
        "known": known_failures(run),
        "anchor_of": lambda finding: anchors.get(finding.coordinates),
        "workloads": workloads,
        "configuration_of": configuration_of,
        "several_subjects": len({cell.subject for cell in measured}) > 1,
        "memory_parts": MEMORY_PARTS.values(),
        "claims": claims(run) if workloads else (),
        "comparability": comparability(run.header.fingerprint).items(),
        "record": record(run).items(),
        "packages": run.header.fingerprint.packages.items(),
        "most_groups": MOST_GROUPS,
        "most_failures": MOST_FAILURES,
        "most_pairs": MOST_PAIRS,
    }
    return _environment().get_template("report.html.jinja").render(values)


def _contents(has_grid: bool, has_wrong: bool, has_figures: bool) -> Iterator[tuple[str, str]]:
    if has_grid:
        yield "support", "Support"
    if has_wrong:
        yield "wrong", "What went wrong"
    if has_figures:
        yield "figures", "Speed and memory"
        yield "claims", "Claims"
    yield "environment", "Environment"
    yield "method", "Method and limits"


def _workloads(measured: Sequence[Measured]) -> Iterator[Workload]:
    for name, group in groupby(measured, key=lambda cell: cell.workload):
        cells = tuple(group)
        units = {metric: figure.unit for cell in cells for metric, figure in cell.figures.items()}
        metrics = [*(metric for metric in _METRICS if metric in units), *(m for m in units if m not in _METRICS)]
        refusals: dict[tuple[str, str], list[Measured]] = {}
        for cell in cells:
            for metric, figure in cell.figures.items():
                if figure.value is None:
                    refusals.setdefault((metric, figure.refusal or "it was not measured"), []).append(cell)
        yield Workload(
            name,
            (
                *curve_charts(f"Throughput, {units.get('throughput', '')}", "throughput", cells),
                *curve_charts("Efficiency, the same work on more devices", "scaling_strong", cells, ideal=1.0),
                *curve_charts("Efficiency, as much work for each device", "scaling_weak", cells, ideal=1.0),
            ),
            distribution_chart(cells),
            memory_chart(cells),
            {metric: units[metric] for metric in metrics},
            refusals,
            cells,
        )


class _Logs:
    """The ends of logs, as long as the page has room for them."""

    def __init__(self, run: Run) -> None:
        self._path = run.path
        self._room = MOST_LOG_TEXT

    def of(self, cell: GridCell) -> list[tuple[str, str]]:
        """Return what the ranks of a cell said last; of what passed, nothing."""
        if not (cell.bad or cell.known or cell.others) or self._room <= 0:
            return []
        shown = log_tails(self._path, cell.cell)
        self._room -= sum(len(tail) for _, tail in shown)
        return shown


def _is_link(text: str) -> bool:
    """Say whether a text may become a link: what a run names is followed only to the web."""
    return text.startswith(("https://", "http://"))


def _shown(value: object) -> object:
    """Take from a text, before it is escaped, what a terminal or a browser would obey without showing it."""
    return printable_lines(value) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("harness.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {
        "as_consequence": as_consequence,
        "between": between,
        "compact": compact,
        "digits": digits,
        "in_words": in_words,
        "is_link": _is_link,
        "names_itself": names_itself,
        "outcome_in_words": outcome_in_words,
        "parameter_rows": lambda finding: parameter_rows(list(finding.parameters.items()), finding.limit_x_noise),
        "shortened": shortened,
        "what_it_says": what_it_says,
    }
    environment.globals["backend_in_words"] = backend_in_words
    environment.globals["row_columns"] = len(ROW_COLUMNS)
    return environment
