"""``report.html``: one file that works offline, and can be read without its script."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import count, groupby
from typing import Any, Final

from jinja2 import Environment

from plumbline.report.formats import ReportFormat
from plumbline.report.html import charts, pictures
from plumbline.report.html.environment import page_environment
from plumbline.report.tables import failures, measured, run_summary, support
from plumbline.report.tables.cells import cell_table
from plumbline.report.tables.claims import claims
from plumbline.report.tables.failures import Diagnosis, diagnoses
from plumbline.report.tables.grid import GridCell, anchors, grids
from plumbline.report.text import between, location, names_itself, place_and_size
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
MOST_LOG_TEXT = 400_000  # characters of logs on one page; logs beyond that are only in ``traces/``
_METRICS: Final = [
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
]
"""The order of the columns of figures; other metrics follow."""


def report_page(run: Run) -> str:
    cells = cell_table(run)
    subjects = grids(run)
    timed = measured.measured_cells(run)
    by = run_summary.computed_by(run)
    workloads = list(_workloads(timed))
    wrong = diagnoses(run)
    facets = _facets(wrong)
    contents = {
        ("wrong", "What went wrong"): wrong,
        ("support", "Support"): subjects,
        ("figures", "Speed and memory"): workloads,
        ("claims", "Claims"): workloads,
        ("environment", "Environment"): True,
        ("method", "Method and limits"): True,
    }
    values: dict[str, Any] = {
        "run": run,
        "verdict": run_summary.verdict_of(run, cells),
        "simulated": run_summary.SIMULATED in by,
        "devices": [name for name in by if name != run_summary.SIMULATED],
        "missing": run_summary.what_is_missing(run, cells),
        "notes": run_summary.notes(run),
        "facts": run_summary.facts(run).items(),
        "contents": [(name, title) for (name, title), is_there in contents.items() if is_there],
        "grids": subjects,
        "side_by_side": support.side_by_side(run),
        "kind": _KIND,
        "sign": SIGNS,
        "words": support.IN_A_WORD,
        "marks": support.MARKS.items(),
        "used_marks": set(cells["mark"]) - {"-"},
        "micro_batches": run_summary.micro_batches_in_words(run),
        "seed": run_summary.seed_in_words(run),
        "logs_of": _logs_of(run),
        "in_full": _in_full(len(cells)),
        "diagnoses": wrong,
        "several_wrong": len({one.group.subject for one in wrong}) > 1,
        "drawn_of": _drawn,
        "facets": facets[:MOST_FACETS],
        "more_facets": len(facets[MOST_FACETS:]),
        "undeclared_rows": support.undeclared_rows(run),
        "script_hash": _script_hash(),
        "doubts": [one.doubt for one in failures.subject_causes(run) if one.doubt],
        "known": failures.known_failures(run),
        "anchor_of": lambda finding: anchors(run).get(finding.coordinates),
        "workloads": workloads,
        "several_subjects": measured.has_several_subjects(timed),
        "memory_parts": charts.MEMORY_PARTS.values(),
        "step_shares": charts.STEP_SHARES.values(),
        "how_to_open": measured.HOW_TO_OPEN,
        "claims": claims(run) if workloads else (),
        "comparability": _comparability(run).items(),
        "other_facts": run_summary.other_facts(run).items(),
        "packages": run.header.fingerprint.packages.items(),
        "most_groups": MOST_GROUPS,
        "most_failures": MOST_FAILURES,
        "most_pairs": MOST_PAIRS,
        "most_pictured": MOST_PICTURED,
    }
    return _environment().get_template("report.html.jinja").render(values)


def _drawn(one: Diagnosis) -> dict[str, Any] | None:
    wrong, paths = pictures.heat_map(one.finding, wrong=True), pictures.rank_paths(one.finding.rank_shares)
    right = pictures.heat_map(one.right, wrong=False) if one.right else None
    return {"wrong": wrong, "right": right, "paths": paths} if wrong or paths else None


def _facets(wrong: Sequence[Diagnosis]) -> list[str]:
    families = dict.fromkeys(one.group.family for one in wrong if one.group.family)
    subjects = dict.fromkeys(one.group.subject for one in wrong)
    return [*(families if len(families) > 1 else ()), *(subjects if len(subjects) > 1 else ())]


def _comparability(run: Run) -> dict[str, str]:
    facts = run_summary.comparability(run.header.fingerprint)
    simulated = facts.get("device") == facts.get("cpu")
    return {name: value for name, value in facts.items() if not (simulated and name == "device")}


@cache
def _script_hash() -> str:
    script = _environment().get_template("find.js").render()
    return b64encode(sha256(script.encode()).digest()).decode()


def _workloads(timed: Sequence[measured.MeasuredCell]) -> Iterator[dict[str, Any]]:
    for name, group in groupby(timed, key=lambda cell: cell.at.workload):
        cells = tuple(group)
        units = {metric: figure.unit for cell in cells for metric, figure in cell.figures.items()}
        metrics = [*(metric for metric in _METRICS if metric in units), *(m for m in units if m not in _METRICS)]
        refusals: dict[tuple[str, str], list[measured.MeasuredCell]] = {}
        for cell in cells:
            for metric, figure in cell.figures.items():
                if figure.value is None:
                    refusals.setdefault((metric, figure.refusal or "not measured"), []).append(cell)
        strong = "Strong scaling efficiency: the same work on more devices"
        weak = "Weak scaling efficiency: the same work for each device"
        curves = (
            *charts.curve_charts(f"Throughput, {units.get('throughput', '')}", "throughput", cells),
            *charts.curve_charts(strong, "scaling_strong", cells, ideal=1.0),
            *charts.curve_charts(weak, "scaling_weak", cells, ideal=1.0),
        )
        memory = charts.memory_chart(cells)
        yield {
            "name": name,
            "curves": curves,
            "steps": charts.distribution_chart(cells),
            "memory": memory,
            "has_peaks": memory is not None and any(bar.mark is not None for bar in memory.bars),
            "shares": charts.share_chart(cells),
            "pipelines": tuple(pictures.pipeline_timelines(cells)),
            "units": {metric: units[metric] for metric in metrics},
            "refusals": refusals,
            "cells": cells,
            "profiled": [cell for cell in cells if cell.profile is not None],
        }


def _in_full(cells: int) -> Callable[[GridCell], bool]:
    """Return which cells a page shows in full: all of a small run, else only the first wrong ones, to open fast."""
    shown = count(1)
    return lambda cell: cells <= MOST_IN_FULL or (bool(cell.bad) and next(shown) <= MOST_IN_FULL)


def _logs_of(run: Run) -> Callable[[str], list[tuple[str, str]]]:
    room = MOST_LOG_TEXT

    def of(cell: str) -> list[tuple[str, str]]:
        nonlocal room
        if room <= 0:
            return []
        shown = log_tails(run.path, cell)
        room -= sum(len(tail) for _, tail in shown)
        return shown

    return of


@cache
def _environment() -> Environment:
    environment = page_environment()
    filters: tuple[Callable[..., Any], ...] = (
        *(failures.as_consequence, failures.expectation_details, failures.message_of, failures.outcome_in_words),
        *(measured.formulas, measured.not_applicable, measured.profile_files, between, location, names_itself),
        place_and_size,
    )
    environment.filters |= {one.__name__: one for one in filters}
    environment.filters["is_link"] = lambda text: text.startswith(("https://", "http://"))
    environment.filters["parameter_rows"] = lambda finding: failures.parameter_rows(
        list(finding.parameters.items()), finding.limit_x_noise
    )
    environment.globals["backend_in_words"] = run_summary.backend_in_words
    environment.globals["row_columns"] = len(support.ROW_COLUMNS)
    return environment


FORMAT = ReportFormat("the whole page", report_page, {"report.html": report_page})
