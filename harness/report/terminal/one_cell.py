"""Everything that a run knows about one cell, for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.core.finding import in_reading_order
from harness.core.outcome import Outcome
from harness.report.html.scales import between, in_words
from harness.report.tables.failures import is_wrong, outcome_in_words
from harness.report.tables.figures import conformance_of
from harness.report.tables.parameters import parameter_table
from harness.report.tables.run_facts import seed_in_words
from harness.report.tables.summary import SIMULATED, devices
from harness.report.terminal.console import rendered
from harness.report.text import compact, printable, printable_lines
from harness.results.logs import log_tails, trace_folder
from harness.results.records import PERFORMANCE, CellRecord, Measurement, Result, ending
from harness.results.run import Run

_STYLES = {Outcome.PASSED: "green", Outcome.DEVIATES: "cyan", Outcome.UNSUPPORTED: "dim", Outcome.SKIPPED: "dim"}


def one_cell(run: Run, cell: str, *, width: int = 100, colour: bool = False) -> str:
    """Return what ``run`` has of the cell with this id, in lines of at most ``width``.

    Only the command that repeats it may be longer, because a line that is cut cannot be copied.
    """
    planned = [record for record in run.header.planned if record.cell == cell]
    results = [record for record in run.results if record.cell == cell]
    measurements = [record for record in run.measurements if record.cell == cell]
    record: CellRecord = [*planned, *results, *measurements][0]
    parts = [
        *_head(run, record, results),
        *_findings(results),
        *_figures(run, measurements),
        *_place(run, cell, [one.reproduce for one in results] + [one.reproduce for one in measurements]),
        *_logs(run, cell),
    ]
    return rendered(*parts, width=width, colour=colour)


def _head(run: Run, cell: CellRecord, results: Sequence[Result]) -> Iterator[RenderableType]:
    word = "no answer in this run"
    if results:
        end = ending(results)
        timed = end is Outcome.PASSED and all(one.check == PERFORMANCE for one in results)
        word = "measured" if timed else (end.value if isinstance(end, Outcome) else end).replace("_", " ")
    elif any(one.cell == cell.cell for one in run.measurements):
        word = "measured"
    yield Text.assemble(
        (printable(cell.cell), "bold"), "  ", (word, "bold red" if any(map(is_wrong, results)) else "bold")
    )
    by = devices(run, cell.accelerator)
    on = "simulated devices" if by == SIMULATED else by
    seconds = next((one.seconds for one in results if one.seconds is not None), None)
    told = [
        f"{cell.subject}, workload {cell.workload}, backend {cell.backend}, precision {cell.precision}",
        f"nodes × gpus: {cell.num_nodes} × {cell.gpus}, {on}",
        f"seed: {seed_in_words(run)}" + ("" if seconds is None else f"; launch: {in_words(seconds, 's')}"),
    ]
    yield from (Text(printable(line), style="dim") for line in told)


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
        where = {"step": result.step, "rank": result.rank, "parameter": result.parameter}
        details = [f"{name} {printable(str(value))}" for name, value in where.items() if value is not None]
        if result.error_x_noise is not None:
            limit = "" if result.limit_x_noise is None else f" of at most {compact(result.limit_x_noise)}"
            details.append(f"{compact(result.error_x_noise)} × noise{limit}")
        yield head
        lines = [", ".join(details)] if details else []
        lines += [printable_lines(result.message)] if result.message else []
        if is_wrong(result) and result.consequence_of is None:
            lines += parameter_table(list(result.parameters.items()), result.limit_x_noise)
        yield Padding(Group(*(Text(line, overflow="fold") for line in lines)), (0, 0, 0, 4))
        if result.expected is not None:
            yield Padding(_expectation(result), (0, 0, 0, 4))


def _expectation(result: Result) -> Text:
    said = result.expected
    assert said is not None
    of, measured = (said.library and f"known of {said.library}"), (said.measured and f"measured with {said.measured}")
    aside = "; ".join(filter(None, (of, measured, said.link, said.reproduction)))
    told = f"expected: {said.outcome.value}, because {said.reason} ({said.entry}{'; ' if aside else ''}{aside})"
    return Text(printable(told), style="yellow", overflow="fold")


def _figures(run: Run, measurements: Sequence[Measurement]) -> Iterator[RenderableType]:
    if not measurements:
        return
    conformance = conformance_of(run)(measurements[0].coordinates)
    yield _title("Figures")
    yield Text(f"conformance: {conformance.sentence}", style="bold red" if conformance.wrong else "")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("metric", overflow="fold")
    table.add_column("rank", justify="right")
    table.add_column("figure", justify="right", overflow="fold")
    table.add_column("95 % between", justify="right", overflow="fold")
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


def _place(run: Run, cell: str, commands: Iterable[str]) -> Iterator[RenderableType]:
    for place, command in enumerate(dict.fromkeys(filter(None, commands))):
        if place == 0:
            yield _title("See it again")
        yield Text(_continued(printable(command)), no_wrap=True, overflow="ignore")
    if folder := trace_folder(run.path, cell):
        yield _title("Evidence")
        yield Text(printable(str(folder)), overflow="fold")


def _continued(command: str, width: int = 96) -> str:
    """Return the command over several lines that a shell takes for one."""
    try:
        words = list(map(shlex.quote, shlex.split(command)))
    except ValueError:  # an open quotation mark: not a command of ours
        return command
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return " \\\n  ".join(lines)


def _logs(run: Run, cell: str) -> Iterator[RenderableType]:
    for ranks, tail in log_tails(run.path, cell):
        yield _title(f"Log of {printable(ranks)}, its end")
        yield Text(printable_lines(tail), overflow="fold")


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold underline")
