"""Expected failures are neither passed nor failed; one that does not occur is as loud as a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.report.markdown import support_page
from plumbline.report.tables.support import MARKS, mark_columns, support_table
from plumbline.report.terminal import support_for_terminal
from plumbline.results.header_footer import Footer
from plumbline.results.records import Expected
from plumbline.results.run import Run

BuildRun = Callable[..., Run]

SAID = Expected(outcome=Outcome.FAILED, reason="a | <b>known</b> thing", link="https://example.org", entry="x.toml, 1")
PASSED, DEVIATES, FAILED, ERRORED = Outcome.PASSED, Outcome.DEVIATES, Outcome.FAILED, Outcome.ERRORED


def expecting(build_run: BuildRun, ends: list[tuple[list[Outcome], list[int]]]) -> Run:
    """Return a run of cells with these outcomes; the findings with these numbers were expected to fail."""
    cells = [Cell("reference", f"w{index}", "ddp", Topology(1, 2), "32", "cpu") for index in range(len(ends))]
    run = build_run({cell: outcomes for cell, (outcomes, _) in zip(cells, ends, strict=True)})
    expected = [index in numbers for outcomes, numbers in ends for index in range(len(outcomes))]
    results = tuple(
        result.model_copy(update={"expected": SAID if said else None})
        for result, said in zip(run.results, expected, strict=True)
    )
    return dataclasses.replace(run, results=results, footer=Footer.of(results, 0))


KNOWN_CELL = ([PASSED, FAILED, FAILED], [1, 2])
UNEXPECTED = ([PASSED, PASSED], [0])


@pytest.mark.parametrize(
    ("ends", "mark", "share"),
    [
        ([KNOWN_CELL], "K", "0/1 (1 known)"),
        ([KNOWN_CELL, ([PASSED], [])], "K", "1/2 (1 known)"),
        ([KNOWN_CELL, ([DEVIATES], [])], "K", "0/2 (1 known)"),
        ([KNOWN_CELL, ([ERRORED], [])], "?", "0/2 (1 known)"),
        ([KNOWN_CELL, ([FAILED], [])], "N", "0/2 (1 known)"),
        ([([FAILED, FAILED], [0])], "N", "0/1"),
        ([([FAILED, ERRORED], [0])], "?", "0/1"),
        ([UNEXPECTED], "X", "0/1"),
        ([([DEVIATES], [0])], "X", "0/1"),
        ([([PASSED, FAILED], [0, 1])], "X", "0/1"),
        ([UNEXPECTED, ([ERRORED], []), KNOWN_CELL], "X", "0/3 (1 known)"),
        ([UNEXPECTED, ([FAILED], [])], "N", "0/2"),
    ],
)
def test_a_row_says_what_was_expected(
    build_run: BuildRun, ends: list[tuple[list[Outcome], list[int]]], mark: str, share: str
) -> None:
    (row,) = support_table(expecting(build_run, ends)).to_dict("records")
    assert {row.get(column, "") for column in mark_columns()} - {""} == {mark}
    assert mark in MARKS
    assert row["Cells passed"] == share


def test_every_cell_is_counted_once(build_run: BuildRun) -> None:
    run = expecting(build_run, [KNOWN_CELL, UNEXPECTED, ([PASSED], []), ([FAILED], [])])
    assert run.footer is not None
    assert run.footer.cells == {Outcome.PASSED: 1, Outcome.FAILED: 1}
    assert (run.footer.known, run.footer.unexpected_passes) == (1, 1)
    shown = support_for_terminal(run)
    assert "4 cells: 1 passed, 1 known, 1 unexpected pass, 1 failed." in shown
    assert "K known" in shown
    assert "X unexpected pass" in shown


def test_the_legend_of_what_nobody_expects_is_left_out(realistic_run: Run) -> None:
    assert "K known" not in support_for_terminal(realistic_run)
    assert "Expected failures" not in support_page(realistic_run)


def test_the_page_tells_the_known_from_what_went_wrong(build_run: BuildRun) -> None:
    run = expecting(build_run, [KNOWN_CELL, UNEXPECTED, ([FAILED, FAILED], [0])])
    page = support_page(run)
    wrong, _, known = page.partition("## Expected failures")
    wrong = wrong.partition("## What went wrong")[2]
    assert "w0" not in wrong
    assert wrong.count("**unexpected pass**") == 1
    assert wrong.count("**failed**") == 1
    assert "x.toml, 1 expects failed" in wrong
    assert known.count("https://example.org") == 1, "cells of one reason stand together"
    assert "reference-w0-ddp-1x2-32" in known
    assert "<b>" not in page


def test_where_only_the_known_failed_the_page_says_so(build_run: BuildRun) -> None:
    run = expecting(build_run, [KNOWN_CELL])
    assert "except where a failure was expected." in support_page(run)
