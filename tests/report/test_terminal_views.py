"""What a terminal shows besides the support table: a run's speed, and one cell of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.report.one_cell import one_cell
from plumbline.report.terminal import MOST_ROWS, speed_for_terminal
from plumbline.results.records import Expected, Measurement
from plumbline.results.run import Run, read_run

BuildRun = Callable[..., Run]

HOSTILE = "evil\x1b[31m\x1b]0;title\x07\u202e[bold]x[/bold] \x9b31m" + "long" * 50
UNPRINTABLE = r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]"


def test_the_speed_of_what_is_wrong_is_struck_through(build_measured_run: BuildRun) -> None:
    lines = speed_for_terminal(build_measured_run(wrong=("dp",))).splitlines()
    (wrong,) = [line for line in lines if line.startswith("perf-mlp") and "dp 32, 1×2" in line and "ddp" not in line]
    assert "~~1,260~~" in wrong
    assert "failed" in wrong
    assert sum("~~" in line for line in lines) == 7, (
        "dp in 32 bits on three topologies, of two workloads; and the legend"
    )
    assert "simulated" in lines[-1]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_speed_table_stays_within_the_width(build_measured_run: BuildRun, measured: Callable, width: int) -> None:
    run = build_measured_run(wrong=("dp",))
    cell = Cell(HOSTILE, HOSTILE, HOSTILE, Topology(2**30, 2**30), HOSTILE, "cpu")
    hostile = (
        measured(cell, "throughput", 1.7e308),
        measured(cell, "step_p50", -1e-300),
        measured(cell, "throughput", None),
    )
    shown = speed_for_terminal(dataclasses.replace(run, measurements=(*run.measurements, *hostile)), width)
    assert max(map(cell_len, shown.splitlines())) <= width
    assert not re.search(UNPRINTABLE, shown)


def test_many_rows_are_cut_off_with_their_number(
    build_measured_run: BuildRun, measured: Callable[..., Measurement]
) -> None:
    cells = [Cell("reference", f"w{number}", "ddp", Topology(1, 2), "32", "cpu") for number in range(MOST_ROWS + 3)]
    figures = tuple(measured(cell, "throughput", 1.0) for cell in cells)
    assert "… and 3 more" in speed_for_terminal(dataclasses.replace(build_measured_run(), measurements=figures))


def test_without_measurements_there_is_no_table(realistic_run: Run) -> None:
    assert speed_for_terminal(realistic_run) == ""


def test_a_cell_is_shown_with_all_that_is_known_of_it(recorded_run: Path) -> None:
    cell = "reference-contrastive-ddp2-2x2-16"
    folder = recorded_run / "traces" / cell
    folder.mkdir(parents=True)
    (folder / "rank-1.log").write_text("Traceback\n\x1b[31mValueError: gone\x1b[0m\n")
    shown = one_cell(read_run(recorded_run), cell)
    first, *others = shown.splitlines()
    assert first == f"{cell}  failed"
    assert max(map(cell_len, shown.splitlines())) <= 100
    for word in (
        "sum-instead-of-mean (averaging)",
        "step 0, rank 1, parameter tower.0.weight, 4.1e6 × noise",
        "<b>2.0 × too large</b>",
        "seed: the workload's own",
        "passed  coverage",
        f"pytest suites/ -k {cell}",
        "Log of rank 1",
        "ValueError: gone",
    ):
        assert word in shown, word
    assert str(folder) in shown.replace("\n", "")
    assert others.index("failed  gradients  sum-instead-of-mean (averaging)") < others.index("passed  coverage")


def test_a_measured_cell_shows_its_figures(build_measured_run: BuildRun) -> None:
    shown = one_cell(build_measured_run(wrong=("dp",)), "reference-perf-mlp-dp-1x2-32")
    assert shown.splitlines()[0] == "reference-perf-mlp-dp-1x2-32  measured"
    assert "1 of 1 cell of this configuration went wrong" in shown
    assert "1,260 samples/s" in shown
    assert "unstable: more launches tell" in shown
    assert "\x1b[9m" not in shown
    assert "\x1b[9m" in one_cell(build_measured_run(wrong=("dp",)), "reference-perf-mlp-dp-1x2-32", colour=True)


def test_what_was_expected_is_told(build_run: BuildRun) -> None:
    cell = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    run = build_run({cell: [Outcome.FAILED]})
    said = Expected(outcome=Outcome.FAILED, reason="a known thing", link="https://example.org", entry="x.toml, entry 1")
    run = dataclasses.replace(run, results=tuple(one.model_copy(update={"expected": said}) for one in run.results))
    shown = one_cell(run, cell.id)
    assert shown.splitlines()[0] == f"{cell.id}  known"
    assert "expected: failed, because a known thing (x.toml, entry 1; https://example.org)" in shown


def test_a_cell_without_an_answer_says_so(build_run: BuildRun) -> None:
    cell = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    assert "no result in this run" in one_cell(build_run({cell: []}, finished=False), cell.id)


@pytest.mark.parametrize("width", [60, 100])
def test_whatever_a_cell_says_stays_within_the_width(build_run: BuildRun, width: int) -> None:
    cell = Cell(HOSTILE, HOSTILE, HOSTILE, Topology(1, 2), HOSTILE, "cpu")
    run = build_run({cell: [Outcome.FAILED, Outcome.CRASHED, Outcome.PASSED]})
    hostile = dict.fromkeys(("message", "check", "parameter", "cause", "family"), HOSTILE)
    results = tuple(
        one.model_copy(update={**hostile, "reproduce": "", "parameters": {HOSTILE: 1e308}}) for one in run.results
    )
    shown = one_cell(dataclasses.replace(run, results=results), cell.id, width=width)
    assert max(map(cell_len, shown.splitlines())) <= width
    assert not re.search(UNPRINTABLE, shown)
    assert "[bold]" in shown, "what looks like rich's markup is text"


def test_a_command_can_be_copied(build_run: BuildRun) -> None:
    """A command over several lines is still one command for a shell."""
    cell = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    run = build_run({cell: [Outcome.PASSED]})
    command = "pytest 'suites/conformance/test_conformance.py::test_cell[reference-mlp-ddp-1x2-32]' --gpus 8 " * 2
    results = tuple(one.model_copy(update={"reproduce": command.strip()}) for one in run.results)
    shown = one_cell(dataclasses.replace(run, results=results), cell.id)
    lines = shown[shown.index("pytest ") :].split("\\\n")
    assert len(lines) > 1
    assert " ".join(line.strip() for line in lines).split() == command.split()
