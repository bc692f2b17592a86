"""A run as Markdown: ``support.md`` with the support table and what did not pass, ``report.md`` on one screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from plumbline.core.numbers import compact, counted, x_noise
from plumbline.report.formats import ReportFormat
from plumbline.report.tables import measured
from plumbline.report.tables.cells import cell_table, counts_in_words, undeclared_in_words, unsupported
from plumbline.report.tables.failures import (
    FailureGroup,
    SubjectCauses,
    as_consequence,
    expectation_details,
    failures,
    known_failures,
    message_of,
    nothing_went_wrong,
    outcome_in_words,
    subject_causes,
    wrong_cells,
)
from plumbline.report.tables.grid import Grid, GridRow, grids
from plumbline.report.tables.run_summary import (
    SIMULATED,
    backend_in_words,
    computed_by,
    facts,
    machine_in_words,
    micro_batches_in_words,
    notes,
    software_in_words,
    verdict_of,
    what_is_missing,
)
from plumbline.report.tables.support import (
    IN_A_WORD,
    MARKS,
    REFERENCE,
    ROW_COLUMNS,
    mark_columns,
    side_by_side,
    support_table,
)
from plumbline.report.text import (
    between,
    in_words,
    markdown,
    markdown_code,
    markdown_table,
    markdown_table_code,
    place_and_size,
    shortened,
)
from plumbline.results.records import Expected, Result
from plumbline.results.run import PROFILES, Run

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
    centred = (*mark_columns(), "Devices")
    sides = ["c" if name in centred else "r" if name in _RIGHT else "l" for name in table.columns]
    shown = [table[name].map(_RENDER.get(name, str)) for name in table.columns]
    blocks = [
        "# Plumbline: support table",
        run_facts(run),
        f"**Real devices**: {markdown(', '.join(dict.fromkeys(table['Devices'])) or 'none')}."
        if not (run.header.simulated or SIMULATED in set(table["Devices"]))
        else "**Simulated devices.** Processes and replicas on the CPU stand in for GPUs. "
        "The table shows correctness; figures of speed and memory, if any, are those of this CPU.",
        *([f"> **{markdown(missing)}**"] if (missing := what_is_missing(run, cells)) else []),
        *(f"> {markdown(note)}" for note in notes(run)),
        *_side_by_side(run),
        markdown_table(list(table.columns), sides, zip(*shown, strict=True)),
        f"{counts_in_words(cells['outcome'])}.",
        _legend(run),
        "## What went wrong",
        *(markdown(summary.doubt) for summary in subject_causes(run) if summary.doubt),
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
    yield (
        "Each entry: a mark, and how many of the trained cells passed or deviate as their contract says. The marks are "
        "explained below the next table."
    )
    yield "## Each trainer"


def run_facts(run: Run) -> str:
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
    wrong = [_finding(result) for findings in wrong_cells(run) for result in findings]
    if len(wrong) > MOST_FINDINGS:
        wrong[MOST_FINDINGS:] = [f"… and {len(wrong) - MOST_FINDINGS} more in results.jsonl"]
    return "\n".join(wrong) or nothing_went_wrong(run)


def known_section(run: Run) -> Iterable[str]:
    if reasons := known_failures(run):
        yield "## Expected failures"
        yield "\n".join(_reason(expected, cells) for expected, cells in reasons.items())


def _reason(expected: Expected, cells: dict[str, list[str]]) -> str:
    details = "; ".join([expected.entry, *expectation_details(expected)])
    lines = [f"- {markdown(expected.reason)} ({markdown(details)})"]
    if expected.link:
        lines.append(f"  - {markdown(expected.link)}")
    shown = [f"  - {markdown_code(cell)} {markdown(', '.join(checks))}" for cell, checks in cells.items()]
    if len(shown) > MOST_FINDINGS:
        shown[MOST_FINDINGS:] = [f"  - … and {len(shown) - MOST_FINDINGS} more cells in results.jsonl"]
    return "\n".join([*lines, *shown])


def _finding(result: Result) -> str:
    if result.consequence_of is not None:
        return f"  - {markdown(as_consequence(result))}"
    details = list(filter(None, [place_and_size(result)]))
    if result.cause is not None:
        details.insert(0, f"{result.cause} ({result.family})" if result.family else result.cause)
    shown = f" ({markdown('; '.join(details))})" if details else ""
    line = f"- {markdown_code(result.cell)} **{outcome_in_words(result)}** {markdown(result.check)}{shown}: "
    line += markdown(shortened(message_of(result), LONGEST_MESSAGE)) or "no message"
    return f"{line}\n  - {markdown_code(result.reproduce)}" if result.reproduce else line


MOST_LINES = 40
_WRONG = ("N", "X", "?")
_MOST_ROWS = 10
_MOST_SUBJECTS = 2
_MOST_FIGURES = 3
_MOST_REASONS = 2
_LONGEST_REASON = 120
_MOST_NOTES = 2
_LONGEST_MESSAGE = 300


def one_screen(run: Run) -> str:
    """Return the page, of at most ``MOST_LINES`` lines. What it leaves out is in ``report.html``."""
    cells = cell_table(run)
    verdict = verdict_of(run, cells)
    found = facts(run)
    lines = [f"# {markdown(verdict.sentence)}", ""]
    groups = failures(run)
    lines += [f"{markdown(verdict.detail)}  "] if verdict.detail else []
    lines += [f"**{markdown(missing)}**  "] if (missing := what_is_missing(run, cells)) else []
    lines += [f"{markdown(note)}  " for note in notes(run)[:_MOST_NOTES]]
    by = computed_by(run)
    lines.append(f"{markdown(counts_in_words(cells['outcome']))}. Devices: {markdown(', '.join(by) or 'none')}.  ")
    if undeclared := unsupported(run, cells):
        lines.append(f"{markdown(undeclared_in_words(undeclared))}.  ")
    lines.append(f"Run {markdown_code(found['run'])}: {markdown_code(shortened(found.get('command', ''), 200))}")
    parts = [*_support(grids(run)), *_speed(measured.measured_cells(run), simulated=SIMULATED in by)]
    below = "\n".join(parts).split("\n") if parts else []
    lines += _wrong(groups, subject_causes(run), room=MOST_LINES - len(lines) - len(below))
    return "\n".join([*lines, *below]) + "\n"


def _support(subjects: Sequence[Grid]) -> Iterator[str]:
    precisions = list(dict.fromkeys(row.precision for grid in subjects for row in grid.rows))
    rows: dict[tuple[str, str, str], dict[str, GridRow]] = {}
    for grid in subjects:
        for row in grid.rows:
            rows.setdefault((grid.subject, row.backend, grid.accelerator), {})[row.precision] = row
    if not rows:
        return
    shown = sorted(rows.items(), key=lambda row: all(one.mark not in _WRONG for one in row[1].values()))[:_MOST_ROWS]
    lines = [
        [
            *map(markdown, (subject, backend_in_words(backend))),
            *(found[one].share if one in found else "" for one in precisions),
        ]
        for (subject, backend, _), found in shown
    ]
    yield ""
    yield markdown_table(["subject", "backend", *map(markdown, precisions)], "ll" + "c" * len(precisions), lines)
    yield ""
    left = f"{len(rows) - len(shown)} more rows are in report.html. " if len(rows) > len(shown) else ""
    used = dict.fromkeys(row.mark for found in rows.values() for row in found.values())
    yield left + ", ".join(f"{mark} {words}" for mark, words in IN_A_WORD.items() if mark in used)


def _wrong(groups: Sequence[FailureGroup], subjects: Sequence[SubjectCauses], *, room: int) -> Iterator[str]:
    if not groups:
        return
    yield ""
    yield "## What went wrong"
    yield ""
    doubts = [summary.doubt for summary in subjects if summary.doubt][:_MOST_SUBJECTS]
    for doubt in doubts:
        yield f"- {markdown(doubt)}"
    shown = room - 3 - len(doubts) - 2  # room for the heading, the command, and the number of further causes
    several = len({group.subject for group in groups}) > 1
    for index, group in enumerate(groups[:shown]):
        finding, count = group.findings[0], len(group.findings)
        family = f" ({markdown(group.family)})" if group.family else ""
        most = "up to " if finding.parameters else ""  # the message has the error of the first place
        error = "" if finding.error_x_noise is None else f", {most}{x_noise(finding.error_x_noise)}"
        message = markdown(shortened(message_of(finding), _LONGEST_MESSAGE))
        of = f" of {markdown(group.subject)}" if several else ""
        yield f"- **{markdown(group.title)}**{family} in {counted(count, 'cell')}{of}{error}: {message}"
        if finding.reproduce and not index:
            yield f"  - {markdown_code(finding.reproduce)}"
    if len(groups) > shown:
        yield f"- … and {len(groups) - shown} more causes, in report.html"


def _speed(cells: Sequence[measured.MeasuredCell], *, simulated: bool) -> Iterator[str]:
    timed = [cell for cell in cells if cell.value("throughput") is not None]
    if not timed:
        return
    yield ""
    yield "## Speed" + (" (simulated devices: not the speed of GPUs)" if simulated else "")
    yield ""
    several = measured.has_several_subjects(timed)
    timed.sort(
        key=lambda cell: (
            cell.conformance.mark == measured.NOT_EXAMINED,
            -cell.at.devices,
            -(cell.value("throughput") or 0.0),
        )
    )
    for cell in timed[:_MOST_FIGURES]:
        figure = cell.figures["throughput"]
        assert figure.value is not None
        speed = in_words(figure.value, figure.unit)
        if figure.low is not None and figure.high is not None:
            speed += f" ({between(figure.low, figure.high, '')})"
        speed = f"~~{markdown(speed)}~~" if cell.conformance.wrong else markdown(speed)
        name = f"{cell.at.workload}, {cell.configuration(several_subjects=several)}"
        yield f"- {markdown(name)}: {speed}; conformance: {markdown(cell.conformance.sentence)}"
    if len(timed) > _MOST_FIGURES:
        yield f"- … and {len(timed) - _MOST_FIGURES} more, in report.html"
    if beside := "; ".join(_beside_figures(cells)):
        yield f"- {beside}"


def _beside_figures(cells: Sequence[measured.MeasuredCell]) -> Iterator[str]:
    for reason, names in list(measured.not_applicable(cells).items())[:_MOST_REASONS]:
        yield f"not applicable: {markdown(', '.join(names))}, because {markdown(shortened(reason, _LONGEST_REASON))}"
    profiles = [cell.profile for cell in cells if cell.profile is not None]
    if profiles:
        files = counted(sum(len(measured.profile_files(one)) for one in profiles), "file")
        yield f"profiles of {counted(len(profiles), 'cell')}: {files} in `{PROFILES}/`"
    if problems := sum(len(one.problems) for one in profiles):
        yield f"{counted(problems, 'problem')} with these, see report.html"


FORMAT = ReportFormat("one screen, as Markdown", one_screen, {"report.md": one_screen, "support.md": support_page})
