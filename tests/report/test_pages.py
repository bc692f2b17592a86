from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from rich.cells import cell_len

from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.report.markdown import MOST_FINDINGS, support_page
from plumbline.report.tables.support import support_table
from plumbline.report.terminal import support_for_terminal
from plumbline.results.run import Run

BuildRun = Callable[..., Run]

HOSTILE = "evil|\\|`<script>alert(1)</script>\n\n# title [link](http://x) \x1b[31m\u202e"


def page_of(run: Run) -> str:
    return support_page(run)


def hostile_run(build_run: BuildRun) -> Run:
    cell = Cell(HOSTILE, HOSTILE, HOSTILE, Topology(1, 2), HOSTILE, "cpu")
    run = build_run({cell: [Outcome.FAILED, Outcome.CRASHED]})
    results = tuple(
        result.model_copy(update={"message": HOSTILE, "reproduce": HOSTILE, "check": HOSTILE, "parameter": HOSTILE})
        for result in run.results
    )
    return dataclasses.replace(run, results=results)


def only(run: Run, subject: str) -> Run:
    planned = [cell for cell in run.header.planned if cell.subject == subject]
    results = tuple(result for result in run.results if result.subject == subject)
    return dataclasses.replace(run, header=run.header.model_copy(update={"planned": planned}), results=results)


def test_what_is_not_declared_is_one_line_in_the_terminal(build_run: Callable[..., Run]) -> None:
    ends = {
        Cell("mine", f"w{number}", backend, Topology(1, 2), "32", "cpu"): [
            Outcome.PASSED if backend == "ddp" else Outcome.UNSUPPORTED
        ]
        for number in range(3)
        for backend in ("dp", "ddp")
    }
    run = build_run(ends)
    shown = support_for_terminal(run)
    assert "mine: dp" not in shown
    assert "\n3 cells skipped: mine does not claim to support them." in shown
    every = support_for_terminal(run, every=True, counted=False)
    assert "mine: dp, 2 gpus, 32" in every
    assert "not declared" not in every


def test_the_page_says_what_ran_and_on_what(realistic_run: Run) -> None:
    page = page_of(realistic_run)
    above_table = page[: page.index("| 1 GPU |")]
    assert realistic_run.header.run_id in above_table
    assert realistic_run.header.fingerprint.commit in above_table
    assert "Simulated devices" in above_table
    assert "INCOMPLETE" not in page


def test_cells_on_the_cpu_are_simulated_whatever_the_header_says(build_run: BuildRun) -> None:
    cell = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    assert "Simulated devices" in page_of(build_run({cell: [Outcome.PASSED]}, simulated=False))
    real = dataclasses.replace(cell, accelerator="cuda")
    assert "Simulated devices" not in page_of(build_run({real: [Outcome.PASSED]}, simulated=False))


def test_an_incomplete_run_is_said_so_above_the_table(realistic_run: Run) -> None:
    run = dataclasses.replace(realistic_run, footer=None, results=realistic_run.results[:40], torn=True)
    page = page_of(run)
    assert "INCOMPLETE" in page[: page.index("| 1 GPU |")]
    assert "INCOMPLETE" in support_for_terminal(run)


def test_the_page_shows_every_finding_that_went_wrong_and_how_to_see_it_again(realistic_run: Run) -> None:
    page = page_of(realistic_run)
    bad = [result for result in realistic_run.results if result.outcome.is_bad]
    assert bad
    for result in bad:
        assert f"`{result.reproduce}`" in page
    assert "4.1e6 × noise" in page


def test_many_findings_are_cut_off_with_their_number(build_run: BuildRun) -> None:
    cell = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    page = page_of(build_run({cell: [Outcome.FAILED] * (MOST_FINDINGS + 7)}))
    assert "… and 7 more" in page
    assert page.count("**failed**") == MOST_FINDINGS


def test_what_a_run_says_never_acts_as_markup(build_run: BuildRun) -> None:
    page = page_of(hostile_run(build_run))
    markdown_it = pytest.importorskip("markdown_it")
    html = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(page)
    assert "<script" not in html
    assert "<a " not in html
    assert html.count("<h1") == 1
    assert html.count("<td") == 12
    assert "\x1b" not in page
    assert "\u202e" not in page


@pytest.mark.parametrize("width", [100, 140])
def test_the_terminal_table_holds_every_reference_command_whole(realistic_run: Run, width: int) -> None:
    alone = only(realistic_run, "reference")
    shown = support_for_terminal(alone, width)
    lines = shown.splitlines()
    assert max(map(cell_len, lines)) <= width
    assert sum("gpus=" in line for line in lines) == len(support_table(alone))
    assert not re.search(r"…(?!=| distributed_backend)", shown)


def test_a_narrow_terminal_table_cuts_no_command(realistic_run: Run) -> None:
    shown = support_for_terminal(only(realistic_run, "reference"), 80)
    assert not re.search(r"…(?!=| distributed_backend)", shown)
    assert "num_nodes=n" in shown


@pytest.mark.parametrize("width", [60, 80, 100])
def test_whatever_a_run_says_stays_within_the_width(build_run: BuildRun, width: int) -> None:
    shown = support_for_terminal(hostile_run(build_run), width)
    assert max(map(cell_len, shown.splitlines())) <= width
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown) is None


def test_the_terminal_says_how_many_cells_and_that_they_are_simulated(realistic_run: Run) -> None:
    shown = support_for_terminal(realistic_run)
    assert "230 cells: 179 passed, 41 deviates, 3 failed, 2 crashed, 5 unsupported." in shown
    assert "simulated" in shown


def test_colour_only_where_wanted(realistic_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    plain = support_for_terminal(realistic_run)
    assert "\x1b" not in plain
    coloured = support_for_terminal(realistic_run, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).split() == plain.split()


def test_a_run_without_cells_has_pages(build_run: BuildRun) -> None:
    assert "0 cells" in support_for_terminal(build_run({}))
    assert "0 cells" in page_of(build_run({}))
