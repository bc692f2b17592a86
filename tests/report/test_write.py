from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from harness.core.cell import Cell
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.report.metrics import METRIC_COLUMNS, metrics_table
from harness.report.support import support_table
from harness.report.write import write_report
from harness.store.errors import RunNotFound
from harness.store.records import Result
from harness.store.run import Run, read_run


def test_a_report_stands_beside_its_records(recorded_run: Path) -> None:
    table = write_report(recorded_run)
    pd.testing.assert_frame_equal(table, support_table(read_run(recorded_run)))
    names = {path.name for path in recorded_run.iterdir()}
    assert names == {"results.jsonl", "support.md", "support.csv", "metrics.csv"}


def test_a_report_can_be_written_again(recorded_run: Path) -> None:
    write_report(recorded_run)
    before = {path.name: path.read_bytes() for path in recorded_run.iterdir()}
    write_report(recorded_run.parent / "latest")
    assert {path.name: path.read_bytes() for path in recorded_run.iterdir()} == before


def test_the_csv_is_the_same_table(recorded_run: Path) -> None:
    table = write_report(recorded_run)
    back = pd.read_csv(recorded_run / "support.csv", keep_default_na=False)
    assert list(back.columns) == list(table.columns)
    assert list(back["Command"]) == list(table["Command"])
    assert list(back["DDP"]) == list(table["DDP"])


def test_metrics_are_one_row_a_figure_with_its_unit(recorded_run: Path) -> None:
    write_report(recorded_run)
    metrics = pd.read_csv(recorded_run / "metrics.csv")
    run = read_run(recorded_run)
    assert list(metrics.columns) == list(METRIC_COLUMNS)
    assert set(zip(metrics["metric"], metrics["unit"], strict=True)) == {
        ("error_x_noise", "× noise"),
        ("seconds", "s"),
    }
    assert (metrics["metric"] == "seconds").sum() == len(run.header.planned)
    assert (metrics["metric"] == "error_x_noise").sum() == sum(
        result.error_x_noise is not None for result in run.results
    )
    assert not metrics["value"].isna().any()


def test_an_infinite_error_is_a_metric_and_a_missing_one_is_not(realistic_run: Run, cells: list[Cell]) -> None:
    found = [
        Finding("infinite", Outcome.FAILED, "", error_x_noise=math.nan),
        Finding("infinite", Outcome.FAILED, "", error_x_noise=2.0),
        Finding("unmeasured", Outcome.FAILED, ""),
    ]
    results = tuple(Result.of(cells[0], finding, "", None) for finding in found)
    metrics = metrics_table(dataclasses.replace(realistic_run, results=results))
    assert list(zip(metrics["check"], metrics["value"], strict=True)) == [("infinite", math.inf)]
    assert metrics_table(dataclasses.replace(realistic_run, results=())).empty


def test_no_run_no_report(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        write_report(tmp_path)


def test_a_report_needs_no_torch() -> None:
    code = "import sys, harness.report.write, harness.report.terminal; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
