"""``report.md`` fits on one screen for any run: verdict, table, failures with their causes, speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.report.markdown import MOST_LINES, one_screen
from plumbline.results.header_footer import Footer
from plumbline.results.run import Run

BuildRun = Callable[..., Run]

HOSTILE = "evil|\\|`<script>alert(1)</script>\n\n# title [link](http://x) \x1b[31m\u202e"


def test_what_is_not_declared_is_one_line(realistic_run: Run) -> None:
    page = one_screen(realistic_run)
    assert page.count("does not claim to support") == 1
    assert "5 cells skipped: my-ddp does not claim to support them (precision 16: 5)." in page
    assert "| my-ddp | ddp | C 5/5 |  |" in page


def test_the_verdict_stands_first_and_a_table_follows(realistic_run: Run) -> None:
    lines = one_screen(realistic_run).splitlines()
    assert lines[0] == "# 1 mistake in reference: sum instead of mean."
    table = [line for line in lines if line.startswith("| reference")]
    assert [line.split("|")[2].strip() for line in table] == ["dp", "ddp2", "one device", "ddp"], (
        "what is wrong is first"
    )
    assert "| N 12/15 |" in table[1]
    assert any("simulated" in line for line in lines)


def test_what_failed_comes_with_its_cause_and_a_command(realistic_run: Run) -> None:
    page = one_screen(realistic_run)
    assert "- **sum-instead-of-mean** (averaging) in 3 cells, 4.1e6 × noise: the gradient is the sum" in page
    assert "  - `pytest suites/ -k reference-contrastive-ddp2-2x2-16`" in page


def test_a_good_run_has_nothing_that_went_wrong(build_measured_run: BuildRun) -> None:
    page = one_screen(build_measured_run())
    assert page.startswith("# Nothing went wrong in 9 cells.")
    assert "## What went wrong" not in page
    assert "simulated devices: not the speed of GPUs" in page


def test_the_speed_of_what_is_wrong_is_struck_through(build_measured_run: BuildRun) -> None:
    lines = one_screen(build_measured_run(wrong=("ddp", "ddp2"))).splitlines()
    speeds = [line for line in lines if "samples/s" in line]
    assert speeds
    for line in speeds:
        assert ("~~" in line) == ("so its speed does not count" in line)
    assert any("~~" in line for line in speeds)


def test_an_incomplete_run_says_so(realistic_run: Run) -> None:
    page = one_screen(dataclasses.replace(realistic_run, footer=None, results=realistic_run.results[:40]))
    assert "INCOMPLETE" in page


def test_what_a_run_says_never_acts_as_markup(build_run: BuildRun) -> None:
    cell = Cell(HOSTILE, HOSTILE, HOSTILE, Topology(1, 2), HOSTILE, "cpu")
    run = build_run({cell: [Outcome.FAILED]})
    results = tuple(result.model_copy(update={"message": HOSTILE, "reproduce": HOSTILE}) for result in run.results)
    markdown_it = pytest.importorskip("markdown_it")
    page = one_screen(dataclasses.replace(run, results=results))
    html = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(page)
    assert "<script" not in html
    assert "<a " not in html
    assert html.count("<h1") == 1
    assert "\x1b" not in page


subjects = st.sampled_from([f"trainer-{number}" for number in range(12)])
cells = st.builds(
    Cell,
    subject=subjects,
    workload=st.sampled_from(["mlp", "perf-mlp"]),
    backend=st.sampled_from(["none", "dp", "ddp", "ddp2", "fsdp"]),
    topology=st.builds(Topology, st.integers(1, 3), st.integers(1, 3)),
    precision=st.sampled_from(["32", "16", "bf16", "64"]),
    accelerator=st.just("cpu"),
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(cells, st.lists(st.sampled_from(Outcome), max_size=2), max_size=60), st.data())
def test_it_is_one_screen(
    build_run: BuildRun, measured: Callable, ends: dict[Cell, list[Outcome]], data: st.DataObject
) -> None:
    run = build_run(ends)
    causes = st.sampled_from([None, "a", "b", "c", "d", "e", "f"])
    results = tuple(
        result.model_copy(update={"cause": data.draw(causes), "family": "sync", "message": "line\n" * 40})
        for result in run.results
    )
    figures = tuple(measured(cell, "throughput", 10.0) for cell in ends)
    whole = dataclasses.replace(run, results=results, measurements=figures, footer=Footer.of(results, 0))
    page = one_screen(whole)
    assert len(page.splitlines()) <= MOST_LINES
    assert page.startswith("# ")
