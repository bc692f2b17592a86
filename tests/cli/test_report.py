"""``plumbline report`` and ``plumbline show``: write a run's pages again, or one of them, or show one cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from plumbline.cli import documents
from plumbline.cli.main import main
from plumbline.core.cell import Cell
from plumbline.core.errors import PlumblineError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.machine.fingerprint import Fingerprint
from plumbline.report.one_cell import cell_called
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Measurement, PlannedCell, Result
from plumbline.results.run_writer import RunWriter

CELLS = [
    Cell("mine", workload, "ddp", Topology(1, gpus), "32", "cpu") for workload in ("mlp", "adam") for gpus in (2, 4)
]
FILES = {"results.jsonl", "report.html", "report.md", "support.md", "support.csv", "metrics.csv"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with four cells, one of which fails, and a figure."""
    header = Header.of(CELLS, command=["pytest"], options={}, fingerprint=Fingerprint(), simulated=True)
    failed = Finding("gradients", Outcome.FAILED, "the sum", "sum-instead-of-mean", "averaging")
    results = [
        Result.of(cell, Finding("gradients", Outcome.PASSED, "right") if index else failed, "pytest -k it", 0.1)
        for index, cell in enumerate(CELLS)
    ]
    timed = PlannedCell.of(Cell("mine", "perf-mlp", "ddp", Topology(1, 2), "32", "cpu")).model_dump()
    with RunWriter(tmp_path, header) as writer:
        writer.write(*results, Measurement(**timed, metric="throughput", unit="samples/s", value=12.0))
        writer.close(Footer.of(results, 1))
    return writer.path


def test_every_file_is_written_again(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(run)]) == 0
    assert {file.name for file in run.iterdir()} == FILES
    assert Path(capsys.readouterr().out.strip()) == run / "report.html"


@pytest.mark.parametrize(
    ("form", "beginning"),
    [("md", "# 1 mistake in"), ("html", "<!doctype html>"), ("csv", "run,cell,subject"), ("json", "{")],
)
def test_one_format_is_printed_and_nothing_written(
    run: Path, capsys: pytest.CaptureFixture, form: str, beginning: str
) -> None:
    assert main(["report", str(run), "--format", form]) == 0
    assert capsys.readouterr().out.startswith(beginning)
    assert {file.name for file in run.iterdir()} == {"results.jsonl"}


def test_one_format_is_written_where_it_is_wanted(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "elsewhere.json"
    assert main(["report", str(run), "--format", "json", "-o", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(file.read_text())["verdict"]["kind"] == "bad"
    assert {file.name for file in run.iterdir()} == {"results.jsonl"}


def test_one_format_is_written_where_a_link_leads(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link.md").symlink_to(tmp_path / "target.md")
    assert main(["report", str(run), "--format", "md", "-o", str(tmp_path / "link.md")]) == 0
    assert (tmp_path / "link.md").is_symlink()
    assert (tmp_path / "target.md").read_text().startswith("# 1 mistake in")


@pytest.mark.parametrize("arguments", [["-o", "x"], ["--format", "xml"], ["--format", "md", "-o", "no/folder/x"]])
def test_a_wrong_command_line_is_said_so(run: Path, capsys: pytest.CaptureFixture, arguments: list[str]) -> None:
    try:
        code = main(["report", str(run), *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 4
    assert capsys.readouterr().err.strip()


@pytest.mark.parametrize("command", [["report"], ["show"]])
def test_there_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture, command: list[str]) -> None:
    assert main([*command, str(tmp_path), *(["x"] if command == ["show"] else [])]) == 2
    assert "There is no run at" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mine-mlp-ddp-1x2-32", "mlp-ddp 1x2 mine-mlp"])
def test_a_cell_is_shown_by_its_id_or_a_part_of_it(run: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    assert main(["show", str(run), name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mine-mlp-ddp-1x2-32  failed\n")
    assert "sum-instead-of-mean (averaging)" in shown
    assert "pytest -k it" in shown


def test_of_several_the_one_that_went_wrong_is_shown(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["show", str(run), "1x2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("mine-mlp-ddp-1x2-32  failed\n")
    assert "2 more cells matched" in captured.err


def test_everything_about_a_cell_is_printed_for_programs(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["show", str(run), CELLS[0].id, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    schema = Path(documents.__file__).with_name("show.schema.json")
    Draft202012Validator(json.loads(schema.read_text())).validate(printed)
    assert (printed["cell"], printed["outcome"], printed["reproduce"]) == (CELLS[0].id, "failed", "pytest -k it")
    assert [one["cause"] for one in printed["findings"]] == ["sum-instead-of-mean"]
    assert main(["show", str(run), "perf", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["outcome"], printed["findings"], printed["figures"][0]["value"]) == ("measured", [], 12.0)


def test_several_cells_are_listed(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["show", str(run), "adam"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "2 cells of this run match 'adam'" in said[0]
    assert said[1:] == ["  mine-adam-ddp-1x2-32  passed", "  mine-adam-ddp-1x4-32  passed"]


def test_candidates_that_went_wrong_come_first_and_undeclared_ones_are_counted() -> None:
    ends = ["unsupported", "passed", "deviates", "missing", "failed", "unsupported", "known", "timed_out"]
    outcomes = {f"mine-w{index}-ddp-1x2-32": end for index, end in enumerate(ends)}
    with pytest.raises(PlumblineError) as raised:
        cell_called("ddp", outcomes)
    head, *shown, last = str(raised.value).splitlines()
    assert head == "8 cells of this run match 'ddp':"
    assert [line.split()[1] for line in shown] == ["failed", "timed", "missing", "known", "deviates", "passed"]
    assert last == "  and 2 that the subject does not claim to support"
    del outcomes["mine-w7-ddp-1x2-32"]
    assert cell_called("ddp", outcomes) == "mine-w4-ddp-1x2-32"
    assert cell_called("w0", outcomes) == "mine-w0-ddp-1x2-32", "who asks for it is shown it"


def test_a_cell_that_is_not_there(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["show", str(run), "\x1b[31mnot-there"]) == 2
    said = capsys.readouterr().err
    assert "no cell of this run has all words of 'not-there'" in said
    assert "\x1b" not in said
