"""``report.md``: a run on one screen, for the summary of a CI job: verdict, what went wrong, table, speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plumbline.report.formats import ReportFormat
from plumbline.report.markdown.support_page import support_page
from plumbline.report.tables.cells import cell_table, counts_in_words, undeclared_in_words, unsupported
from plumbline.report.tables.failures import FailureGroup, SubjectCauses, failures, message_of, subject_causes
from plumbline.report.tables.grid import Grid, GridRow, grids
from plumbline.report.tables.measured import (
    NOT_EXAMINED,
    MeasuredCell,
    has_several_subjects,
    measured_cells,
    not_applicable,
    profile_files,
)
from plumbline.report.tables.run_summary import (
    SIMULATED,
    backend_in_words,
    computed_by,
    facts,
    notes,
    verdict_of,
    what_is_missing,
)
from plumbline.report.tables.support import IN_A_WORD
from plumbline.report.text import (
    between,
    counted,
    in_words,
    markdown,
    markdown_code,
    markdown_table,
    shortened,
    x_noise,
)
from plumbline.results.run import PROFILES, Run

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
    # Of a run that went wrong, the detail is its first cause, which is told below.
    lines += [f"{markdown(verdict.detail)}  "] if verdict.detail and not groups else []
    lines += [f"**{markdown(missing)}**  "] if (missing := what_is_missing(run, cells)) else []
    lines += [f"{markdown(note)}  " for note in notes(run)[:_MOST_NOTES]]
    by = computed_by(run)
    lines.append(f"{markdown(counts_in_words(cells['outcome']))}. Devices: {markdown(', '.join(by) or 'none')}.  ")
    if undeclared := unsupported(run, cells):
        lines.append(f"{markdown(undeclared_in_words(undeclared))}.  ")
    lines.append(f"Run {markdown_code(found['run'])}: {markdown_code(shortened(found.get('command', ''), 200))}")
    below = [*_support(grids(run)), *_speed(measured_cells(run), simulated=SIMULATED in by)]
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
    right = {key: all(row.mark not in _WRONG for row in found.values()) for key, found in rows.items()}
    shown = sorted(rows.items(), key=lambda row: right[row[0]])[:_MOST_ROWS]
    lines = [
        [
            markdown(subject),
            markdown(backend_in_words(backend)),
            *(found[name].share if name in found else "" for name in precisions),
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
    divided = [summary for summary in subjects if summary.others][:_MOST_SUBJECTS]
    for summary in divided:
        yield f"- {markdown(' '.join(summary.sentences))}"
    shown = room - 3 - len(divided) - 2  # the heading, the command, and how many more there are
    several = len({group.subject for group in groups}) > 1
    for place, group in enumerate(groups[:shown]):
        finding, count = group.findings[0], len(group.findings)
        family = f" ({markdown(group.family)})" if group.family else ""
        error = "" if finding.error_x_noise is None else f", {x_noise(finding.error_x_noise)}"
        message = markdown(shortened(message_of(finding), _LONGEST_MESSAGE))
        of = f" of {markdown(group.subject)}" if several else ""
        yield f"- **{markdown(group.title)}**{family} in {counted(count, 'cell')}{of}{error}: {message}"
        if finding.reproduce and not place:
            yield f"  - {markdown_code(finding.reproduce)}"
    if len(groups) > shown:
        yield f"- … and {len(groups) - shown} more causes, in report.html"


def _speed(cells: Sequence[MeasuredCell], *, simulated: bool) -> Iterator[str]:
    timed = [cell for cell in cells if cell.value("throughput") is not None]
    if not timed:
        return
    yield ""
    yield "## Speed" + (" (simulated devices: not the speed of GPUs)" if simulated else "")
    yield ""
    several = has_several_subjects(timed)
    timed.sort(key=_reading_order)
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


def _beside_figures(cells: Sequence[MeasuredCell]) -> Iterator[str]:
    for reason, names in list(not_applicable(cells).items())[:_MOST_REASONS]:
        yield f"not applicable: {markdown(', '.join(names))}, because {markdown(shortened(reason, _LONGEST_REASON))}"
    profiles = [cell.profile for cell in cells if cell.profile is not None]
    if profiles:
        files = counted(sum(len(profile_files(one)) for one in profiles), "file")
        yield f"profiles of {counted(len(profiles), 'cell')}: {files} in `{PROFILES}/`"
    if problems := sum(len(one.problems) for one in profiles):
        yield f"{counted(problems, 'problem')} with these, see report.html"


def _reading_order(cell: MeasuredCell) -> tuple[bool, int, float]:
    return cell.conformance.mark == NOT_EXAMINED, -cell.at.devices, -(cell.value("throughput") or 0.0)


FORMAT = ReportFormat("one screen, as Markdown", one_screen, {"report.md": one_screen, "support.md": support_page})
