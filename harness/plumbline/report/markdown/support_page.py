"""``support.md``: the support table as a page, with the run's facts, its legend, and what did not pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pandas as pd

from plumbline.report.finding_words import location
from plumbline.report.tables.cells import cell_table, counts_in_words
from plumbline.report.tables.failures import (
    as_consequence,
    expectation_details,
    known_failures,
    message_of,
    nothing_went_wrong,
    outcome_in_words,
    subject_causes,
    wrong_cells,
)
from plumbline.report.tables.run_summary import (
    SIMULATED,
    machine_in_words,
    micro_batches_in_words,
    notes,
    software_in_words,
    what_is_missing,
)
from plumbline.report.tables.support import MARKS, REFERENCE, ROW_COLUMNS, mark_columns, side_by_side, support_table
from plumbline.report.text import (
    compact,
    markdown,
    markdown_code,
    markdown_table,
    markdown_table_code,
    shortened,
    x_noise,
)
from plumbline.results.records import Expected, Result
from plumbline.results.run import Run

MOST_FINDINGS = 100
LONGEST_MESSAGE = 1000

_RENDER: dict[str, Callable[..., str]] = {
    "Command": markdown_table_code,
    "Worst × noise": compact,
    "Devices": markdown,
}
_RIGHT = ("Cells passed", "Deviates", "Worst × noise")


def support_page(run: Run) -> str:
    cells, table = cell_table(run), support_table(run)
    blocks = [
        "# Plumbline: support table",
        run_facts(run),
        _devices(run, table),
        *_warnings(run, cells),
        *_side_by_side(run),
        _support_table(table),
        f"{counts_in_words(cells['outcome'])}.",
        _legend(run),
        "## What went wrong",
        *(markdown(" ".join(summary.sentences)) for summary in subject_causes(run)),
        findings_section(run),
        *known_section(run),
    ]
    return "\n\n".join(blocks) + "\n"


def _side_by_side(run: Run) -> Iterable[str]:
    table = side_by_side(run)
    if table is None:
        return
    yield "## Side by side"
    subjects = len(table.columns) - len(ROW_COLUMNS)
    rows = ([*map(markdown, row)] for row in table.itertuples(index=False))
    yield markdown_table([*map(markdown, table.columns)], "lll" + "c" * subjects, rows)
    yield "A mark, and how many of the cells that were trained passed; the marks are explained below the next table."
    yield "## Each trainer"


def _support_table(table: pd.DataFrame) -> str:
    centred = (*mark_columns(), "Devices")
    sides = ["c" if name in centred else "r" if name in _RIGHT else "l" for name in table.columns]
    shown = [table[name].map(_RENDER.get(name, str)) for name in table.columns]
    return markdown_table(list(table.columns), sides, zip(*shown, strict=True))


def run_facts(run: Run) -> str:
    """Return what ran, when, with which software, and where."""
    header, machine = run.header, run.header.fingerprint
    facts = {
        "run": f"{markdown_code(header.run_id)}, started {header.started:%Y-%m-%d %H:%M:%S} UTC",
        "plumbline": f"{markdown(header.plumbline)}, commit {markdown_code(machine.commit or 'unknown')}",
        "command": markdown_code(" ".join(header.command) or "unknown"),
        "software": markdown(software_in_words(run)),
        "subjects": markdown("; ".join(f"{name}: {what}" for name, what in header.subjects.items() if what.library)),
        "machine": markdown(machine_in_words(machine)),
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value)


def _devices(run: Run, table: pd.DataFrame) -> str:
    if run.header.simulated or SIMULATED in set(table["Devices"]):
        return (
            "**Simulated devices.** Processes and replicas on the CPU take the place of GPUs. "
            "The table shows correctness; no figure of this run is about speed."
        )
    return f"**Real devices**: {markdown(', '.join(dict.fromkeys(table['Devices'])) or 'none')}."


def _warnings(run: Run, cells: pd.DataFrame) -> Iterable[str]:
    if missing := what_is_missing(run, cells):
        yield f"> **{markdown(missing)}**"
    yield from (f"> {markdown(note)}" for note in notes(run))


def _legend(run: Run) -> str:
    lines = [f"- `{sign}`: {meaning}" for sign, meaning in MARKS.items()]
    lines += [
        "- empty: the column does not apply to the row",
        "- Cells passed: of the cells that were trained. A cell is one workload on one topology (k gpus, n nodes)",
        "- Worst × noise: the largest error, in multiples of rounding noise",
    ]
    lines += [f"- {sentence}" for sentence in micro_batches_in_words(run)]
    if any(cell.subject == REFERENCE for cell in (*run.header.planned, *run.results)):
        lines.append(
            "- `Trainer(gpus=k)` without a backend trains with dp: unless it has cells of its own, "
            "the dp rows apply to it"
        )
    return "\n".join(lines)


def findings_section(run: Run) -> str:
    wrong = [result for findings in wrong_cells(run) for result in findings]
    if not wrong:
        return nothing_went_wrong(run)
    lines = [_finding(result) for result in wrong[:MOST_FINDINGS]]
    if len(wrong) > MOST_FINDINGS:
        lines.append(f"… and {len(wrong) - MOST_FINDINGS} more in results.jsonl")
    return "\n".join(lines)


def known_section(run: Run) -> Iterable[str]:
    """Yield the expected failures by reason, each with its cells and their checks."""
    reasons = known_failures(run)
    if reasons:
        yield "## Expected failures"
        yield "\n".join(_reason(expected, cells) for expected, cells in reasons.items())


def _reason(expected: Expected, cells: dict[str, list[str]]) -> str:
    details = "; ".join([expected.entry, *expectation_details(expected)])
    lines = [f"- {markdown(expected.reason)} ({markdown(details)})"]
    if expected.link:
        lines.append(f"  - {markdown(expected.link)}")
    shown = [f"  - {markdown_code(cell)} {markdown(', '.join(checks))}" for cell, checks in cells.items()]
    lines += shown[:MOST_FINDINGS]
    if len(shown) > MOST_FINDINGS:
        lines.append(f"  - … and {len(shown) - MOST_FINDINGS} more cells in results.jsonl")
    return "\n".join(lines)


def _finding(result: Result) -> str:
    if result.consequence_of is not None:
        return f"  - {markdown(as_consequence(result))}"
    details = location(result)
    if result.cause is not None:
        details.insert(0, f"{result.cause} ({result.family})" if result.family else result.cause)
    if result.error_x_noise is not None:
        details.append(x_noise(result.error_x_noise))
    shown = f" ({markdown('; '.join(details))})" if details else ""
    line = f"- {markdown_code(result.cell)} **{outcome_in_words(result)}** {markdown(result.check)}{shown}: "
    line += markdown(shortened(message_of(result), LONGEST_MESSAGE)) or "no message"
    return f"{line}\n  - {markdown_code(result.reproduce)}" if result.reproduce else line
