"""``plumbline show``: finds one cell of a run by a few words, and shows everything that the run recorded about it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from plumbline.core.errors import PlumblineError
from plumbline.core.finding import in_reading_order
from plumbline.core.numbers import compact
from plumbline.core.outcome import Outcome
from plumbline.report.tables.cells import DECLINED, MISSING, cell_table
from plumbline.report.tables.failures import expectation_details, is_wrong, outcome_in_words, parameter_table
from plumbline.report.tables.measured import HOW_TO_OPEN, conformance_of, profile_files
from plumbline.report.tables.run_summary import SIMULATED, devices, seed_in_words
from plumbline.report.terminal import plain_table, rendered
from plumbline.report.text import between, in_words, place_and_size, printable, printable_lines
from plumbline.results.files import log_tails, trace_folder
from plumbline.results.records import KNOWN, PERFORMANCE, CellRecord, Measurement, Result, ending, grouped
from plumbline.results.run import Run

MOST_CANDIDATES: Final = 30
COMMAND_WIDTH: Final = 96
MEASURED: Final = "measured"
_AFTER_WRONG: Final = (MISSING, KNOWN, Outcome.DEVIATES.value, Outcome.PASSED.value, MEASURED, *DECLINED)
"""Outcomes of cells that did not go wrong, in the order in which candidates are listed."""

_STYLES = {Outcome.PASSED: "green", Outcome.DEVIATES: "cyan", Outcome.UNSUPPORTED: "dim", Outcome.SKIPPED: "dim"}


def cell_called(name: str, outcomes: Mapping[str, str]) -> str:
    """Return the cell with the id ``name``, or the only one, or the only wrong one, whose id has all words of ``name``.

    Otherwise raise ``PlumblineError``. Its message lists the matching cells, wrong ones first.
    """
    if name in outcomes:
        return name
    found = matching(name, outcomes)
    wrong = [cell for cell in found if _rank(outcomes[cell]) == 0]
    for only in (found, wrong):
        if len(only) == 1:
            return only[0]
    if not found:
        raise PlumblineError(
            f"no cell of this run has all words of {printable(name)!r} in its id. Ids look like "
            "SUBJECT-WORKLOAD-BACKEND-NODESxGPUS-PRECISION, for example reference-mlp-ddp-1x2-32"
        )
    raise PlumblineError(
        "\n".join([f"{len(found)} cells of this run match {printable(name)!r}:", *_listed(found, outcomes)])
    )


def matching(name: str, outcomes: Mapping[str, str]) -> list[str]:
    return [cell for cell in outcomes if all(word in cell for word in name.split())]


def cell_outcomes(run: Run) -> dict[str, str]:
    cells = cell_table(run)
    outcomes = dict(zip(cells["cell"], cells["outcome"], strict=True))
    results = grouped((one for one in run.results if one.cell not in outcomes), lambda one: one.cell)
    measured = {record.cell: MEASURED for record in run.measurements if record.cell not in outcomes}
    for cell, found in results.items():
        end = ending(found)
        if end is not Outcome.PASSED:
            measured[cell] = str(end)
    missing = {one.cell: MISSING for one in run.header.planned if one.cell not in outcomes | measured}
    return {**outcomes, **measured, **missing}


def _listed(found: list[str], outcomes: Mapping[str, str]) -> list[str]:
    declared = [cell for cell in found if outcomes[cell] != Outcome.UNSUPPORTED.value]
    listed = sorted(declared or found, key=lambda cell: _rank(outcomes[cell]))
    shown = {printable(cell): outcomes[cell].replace("_", " ") for cell in listed[:MOST_CANDIDATES]}
    width = max(map(len, shown))
    lines = [f"  {cell:{width}}  {outcome}" for cell, outcome in shown.items()]
    if len(listed) > len(shown):
        lines.append(f"  … and {len(listed) - len(shown)} more")
    if len(listed) < len(found):
        lines.append(f"  and {len(found) - len(listed)} that the subject does not claim to support")
    return lines


def _rank(outcome: str) -> int:
    return 1 + _AFTER_WRONG.index(outcome) if outcome in _AFTER_WRONG else 0


def one_cell(run: Run, cell: str, *, width: int = 100, colour: bool = False) -> str:
    """Return everything that ``run`` recorded about a cell, in lines of at most ``width``; a command can be longer."""
    planned = [record for record in run.header.planned if record.cell == cell]
    results = [record for record in run.results if record.cell == cell]
    measurements = [record for record in run.measurements if record.cell == cell]
    record: CellRecord = [*planned, *results, *measurements][0]
    parts = [
        *_head(run, record, results),
        *_findings(results),
        *_figures(run, measurements),
        *_beside_figures(run, results, measurements),
        *_place(run, cell, [one.reproduce for one in results] + [one.reproduce for one in measurements]),
    ]
    return rendered(*parts, width=width, colour=colour)


def _head(run: Run, cell: CellRecord, results: Sequence[Result]) -> Iterator[RenderableType]:
    word = "no result in this run"
    if results:
        end = ending(results)
        timed = end is Outcome.PASSED and all(one.check == PERFORMANCE for one in results)
        word = "measured" if timed else str(end).replace("_", " ")
    elif any(one.cell == cell.cell for one in run.measurements):
        word = "measured"
    yield Text.assemble(
        (printable(cell.cell), "bold"), "  ", (word, "bold red" if any(map(is_wrong, results)) else "bold")
    )
    by = devices(run, cell.accelerator)
    on = "simulated devices" if by == SIMULATED else by
    seconds = next((one.seconds for one in results if one.seconds is not None), None)
    lines = [
        f"{cell.subject}, workload {cell.workload}, backend {cell.backend}, precision {cell.precision}",
        f"nodes × gpus: {cell.num_nodes} × {cell.gpus}, {on}",
        f"seed: {seed_in_words(run)}" + ("" if seconds is None else f"; launch: {in_words(seconds, 's')}"),
    ]
    yield from (Text(printable(line), style="dim") for line in lines)


def _findings(results: Sequence[Result]) -> Iterator[RenderableType]:
    if not results:
        return
    yield _title("Findings")
    for result in sorted(in_reading_order(results), key=lambda one: not is_wrong(one)):
        style = "bold red" if is_wrong(result) else _STYLES.get(result.outcome, "yellow")
        head = Text.assemble((outcome_in_words(result), style), "  ", (printable(result.check), "bold"))
        if result.cause:
            head.append(f"  {printable(result.cause)}", style="bold")
            head.append(f" ({printable(result.family)})" if result.family else "")
        if result.consequence_of:
            head.append(f"  consequence of {printable(result.consequence_of)}")
        limit = "" if result.limit_x_noise is None else f" (at most {compact(result.limit_x_noise)} allowed)"
        yield head
        lines = [where] if (where := place_and_size(result, limit)) else []
        lines += [printable_lines(result.message)] if result.message else []
        if is_wrong(result) and result.consequence_of is None:
            lines += parameter_table(list(result.parameters.items()), result.limit_x_noise)
        yield Padding(Group(*(Text(line, overflow="fold") for line in lines)), (0, 0, 0, 4))
        if (known := result.expected) is not None:
            details = [known.entry, *([known.link] if known.link else []), *expectation_details(known)]
            text = f"expected: {known.outcome.value}, because {known.reason} ({'; '.join(details)})"
            yield Padding(Text(printable(text), style="yellow", overflow="fold"), (0, 0, 0, 4))


def _figures(run: Run, measurements: Sequence[Measurement]) -> Iterator[RenderableType]:
    if not measurements:
        return
    conformance = conformance_of(run)(measurements[0].coordinates)
    yield _title("Figures")
    yield Text(f"conformance: {conformance.sentence}", style="bold red" if conformance.wrong else "")
    table = plain_table()
    table.add_column("metric", overflow="fold")
    table.add_column("rank", justify="right")
    table.add_column("figure", justify="right", overflow="fold")
    table.add_column("95 % interval", justify="right", overflow="fold")
    table.add_column("launches", justify="right")
    for one in measurements:
        bounds = "" if one.low is None or one.high is None else between(one.low, one.high, one.unit)
        figure = "no figure" if one.value is None else in_words(one.value, one.unit)
        table.add_row(
            Text(printable(one.metric)),
            "" if one.rank is None else str(one.rank),
            Text(printable(figure), style="strike" if conformance.wrong and one.value is not None else ""),
            Text(printable(bounds)),
            str(len(one.samples) or ""),
        )
    yield table
    for one in measurements:
        if one.value is None:
            yield Text(printable(f"{one.metric}: {one.refusal or 'no figure'}"), overflow="fold")


def _beside_figures(
    run: Run, results: Sequence[Result], measurements: Sequence[Measurement]
) -> Iterator[RenderableType]:
    for one in measurements:
        if one.formula:
            yield Text(printable(f"{one.metric} = {one.formula}"), overflow="fold")
    for result in results:
        for metric, reason in result.not_applicable.items():
            yield Text(printable(f"{metric}: not applicable, because {reason}"), overflow="fold")
        if result.profile is None:
            continue
        yield _title("Profile")
        yield Text(HOW_TO_OPEN, style="dim")
        for file in profile_files(result.profile):
            yield Text(printable(f"{file.name}: {run.path / file.path}"), overflow="fold")
        for problem in result.profile.problems:
            yield Text(printable(problem), style="yellow", overflow="fold")


def _place(run: Run, cell: str, commands: Iterable[str]) -> Iterator[RenderableType]:
    for index, command in enumerate(dict.fromkeys(filter(None, commands))):
        if index == 0:
            yield _title("Reproduce")
        lines = [printable(command)]
        with suppress(ValueError):  # unbalanced quotation marks: not written by Plumbline
            words = map(shlex.quote, shlex.split(lines[0]))
            lines = [next(words, "")]
            for word in words:
                if len(lines[-1]) + len(word) < COMMAND_WIDTH:
                    lines[-1] += f" {word}"
                else:
                    lines.append(word)
        yield Text(" \\\n  ".join(lines), no_wrap=True, overflow="ignore")
    if folder := trace_folder(run.path, cell):
        yield _title("Traces")
        yield Text(printable(str(folder)), overflow="fold")
    for ranks, tail in log_tails(run.path, cell):
        yield _title(f"Log of {printable(ranks)}, last lines")
        yield Text(printable_lines(tail), overflow="fold")


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold underline")
