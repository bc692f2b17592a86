"""``support.md``: the support table as a page, with what stands behind it and what did not pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from harness.core.finding import in_reading_order
from harness.report.tables.cells import cell_table
from harness.report.tables.failures import as_consequence, is_wrong, known_failures, outcome_in_words, what_it_says
from harness.report.tables.run_facts import machine_in_words, software_in_words
from harness.report.tables.side_by_side import ROW_COLUMNS, side_by_side
from harness.report.tables.subject_causes import subject_causes
from harness.report.tables.summary import SIMULATED, counts_in_words, notes, what_is_missing
from harness.report.tables.support import MARK_COLUMNS, MARKS, REFERENCE
from harness.report.text import compact, markdown, markdown_code, markdown_table_code, shortened
from harness.results.records import Coordinates, Expected, Result
from harness.results.run import Run

MOST_FINDINGS = 100
LONGEST_MESSAGE = 1000

_RENDER: dict[str, Callable[..., str]] = {
    **dict.fromkeys(MARK_COLUMNS, str),
    "Command": markdown_table_code,
    "Worst × noise": compact,
    "Devices": markdown,
}
_CENTRED = (*MARK_COLUMNS, "Devices")
_RIGHT = ("Cells passed", "Deviates", "Worst × noise")


def support_page(run: Run, table: pd.DataFrame) -> str:
    """Return the page for ``table``, which is the run's support table."""
    cells = cell_table(run)
    blocks = [
        "# Plumbline: support table",
        _facts(run),
        _devices(run, table),
        *_warnings(run, cells),
        *_side_by_side(run),
        markdown_table(table),
        f"{counts_in_words(cells['outcome'])}.",
        _legend(run),
        "## What went wrong",
        *(markdown(" ".join(summary.sentences)) for summary in subject_causes(run)),
        _findings(run),
        *_known(run),
    ]
    return "\n\n".join(blocks) + "\n"


def _side_by_side(run: Run) -> Iterable[str]:
    table = side_by_side(run)
    if table is None:
        return
    yield "## Side by side"
    rules = ["---", "---", "---", *([":-:"] * (len(table.columns) - len(ROW_COLUMNS)))]
    rows = [list(map(markdown, row)) for row in table.itertuples(index=False)]
    yield "\n".join(map(_line, [list(map(markdown, table.columns)), rules, *rows]))
    yield "A mark, and how many of the cells tried passed; the marks are explained below the next table."
    yield "## Each by itself"


def markdown_table(table: pd.DataFrame) -> str:
    """Return a support table as GitHub Markdown."""
    columns = list(table.columns)
    rules = [":-:" if name in _CENTRED else "--:" if name in _RIGHT else "---" for name in columns]
    rows = [
        [_RENDER.get(name, str)(value) for name, value in zip(columns, row, strict=True)]
        for row in table.itertuples(index=False)
    ]
    return "\n".join(map(_line, [columns, rules, *rows]))


def _line(parts: Sequence[str]) -> str:
    return f"| {' | '.join(parts)} |"


def _facts(run: Run) -> str:
    header, machine = run.header, run.header.fingerprint
    facts = {
        "run": f"{markdown_code(header.run_id)}, started {header.started:%Y-%m-%d %H:%M:%S} UTC",
        "commit": markdown_code(machine.commit or "unknown"),
        "command": markdown_code(" ".join(header.command) or "unknown"),
        "software": markdown(software_in_words(run)),
        "subjects": markdown("; ".join(f"{name}: {what}" for name, what in header.subjects.items() if what.library)),
        "machine": markdown(machine_in_words(machine)),
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value)


def _devices(run: Run, table: pd.DataFrame) -> str:
    if run.header.simulated or SIMULATED in set(table["Devices"]):
        return (
            "**Simulated devices.** Processes and replicas stand in for the GPUs of this run. "
            "The table is about right and wrong; no figure of this run is about speed."
        )
    return f"**Real devices**: {markdown(', '.join(dict.fromkeys(table['Devices'])) or 'none')}."


def _warnings(run: Run, cells: pd.DataFrame) -> Iterable[str]:
    if missing := what_is_missing(run, cells):
        yield f"> **{markdown(missing)}**"
    yield from (f"> {markdown(note)}" for note in notes(run))


def _legend(run: Run) -> str:
    lines = [f"- `{sign}`: {meaning}" for sign, meaning in MARKS.items()]
    lines += [
        "- empty: the column does not describe the row",
        "- Cells passed: of the cells tried. A cell is one workload on one topology (k gpus, n nodes)",
        "- Worst × noise: the largest error, in multiples of what rounding alone explains",
    ]
    if any(cell.subject == REFERENCE for cell in (*run.header.planned, *run.results)):
        lines.append(
            "- `Trainer(gpus=k)` without a backend trains with dp: unless it has cells of its own, "
            "the dp rows speak for it"
        )
    return "\n".join(lines)


def _findings(run: Run) -> str:
    cells: dict[Coordinates, list[Result]] = {}
    for result in run.results:
        if is_wrong(result):
            cells.setdefault(result.coordinates, []).append(result)
    wrong = [result for results in cells.values() for result in in_reading_order(results)]
    if not wrong:
        nothing = "Nothing failed, errored, crashed or ran out of time in what was recorded"
        return f"{nothing}, but what was expected to." if any(one.is_known for one in run.results) else f"{nothing}."
    lines = [_finding(result) for result in wrong[:MOST_FINDINGS]]
    if len(wrong) > MOST_FINDINGS:
        lines.append(f"… and {len(wrong) - MOST_FINDINGS} more in results.jsonl")
    return "\n".join(lines)


def _known(run: Run) -> Iterable[str]:
    """Yield what went wrong as expected, by reason: with each the cells, and their checks."""
    reasons = known_failures(run)
    if reasons:
        yield "## What is known"
        yield "\n".join(_reason(expected, cells) for expected, cells in reasons.items())


def _reason(expected: Expected, cells: dict[str, list[str]]) -> str:
    of = expected.library and f"known of {expected.library}"
    aside = (of, expected.measured and f"measured with {expected.measured}", expected.entry, expected.reproduction)
    lines = [f"- {markdown(expected.reason)} ({markdown('; '.join(filter(None, aside)))})"]
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
    where = {"step": result.step, "rank": result.rank, "parameter": result.parameter}
    details = [f"{name} {value}" for name, value in where.items() if value is not None]
    if result.cause is not None:
        details.insert(0, f"{result.cause} ({result.family})" if result.family else result.cause)
    if result.error_x_noise is not None:
        details.append(f"{compact(result.error_x_noise)} × noise")
    aside = f" ({markdown('; '.join(details))})" if details else ""
    line = f"- {markdown_code(result.cell)} **{outcome_in_words(result)}** {markdown(result.check)}{aside}: "
    line += markdown(shortened(what_it_says(result), LONGEST_MESSAGE)) or "no message"
    return f"{line}\n  - {markdown_code(result.reproduce)}" if result.reproduce else line
