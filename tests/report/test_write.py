from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from jsonschema import Draft202012Validator

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.report.for_programs import FILE, as_json
from plumbline.report.formats import write_report
from plumbline.report.markdown import support_page
from plumbline.report.tables.cells import cell_table
from plumbline.report.tables.measured import METRIC_COLUMNS, metrics_table
from plumbline.report.tables.support import support_table
from plumbline.results.files import RunNotFound
from plumbline.results.records import Result
from plumbline.results.run import Run, read_run

REPORT = Draft202012Validator(json.loads(FILE.read_text()))


def test_a_report_stands_beside_its_records(recorded_run: Path) -> None:
    write_report(recorded_run)
    names = {path.name for path in recorded_run.iterdir()}
    assert names == {"results.jsonl", "report.html", "report.md", "support.md", "support.csv", "metrics.csv"}


def test_a_report_can_be_written_again(recorded_run: Path) -> None:
    write_report(recorded_run)
    before = {path.name: path.read_bytes() for path in recorded_run.iterdir()}
    write_report(recorded_run.parent / "latest")
    assert {path.name: path.read_bytes() for path in recorded_run.iterdir()} == before


def test_the_csv_is_the_same_table(recorded_run: Path) -> None:
    write_report(recorded_run)
    table = support_table(read_run(recorded_run))
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


def test_measurements_are_metrics_with_their_bounds(build_measured_run: Callable[..., Run]) -> None:
    run = build_measured_run(wrong=("dp",))
    metrics = metrics_table(run)
    found = metrics[metrics["check"] == ""].set_index(["cell", "metric"])
    speed = found.loc[("reference-perf-mlp-dp-1x2-32", "throughput")]
    assert (speed["value"], speed["unit"], speed["better"]) == (pytest.approx(1260.0), "samples/s", "higher")
    assert speed["low"] < speed["value"] < speed["high"]
    assert speed["conformance"] == "N"
    assert pd.isna(speed["rank"])
    assert found.loc[("reference-perf-mlp-dp-1x2-32", "tensors_gradients")]["rank"] == 0
    assert found.loc[("reference-perf-mlp-dp-1x2-16", "throughput")]["conformance"] == "not examined"
    refused = found.loc[("reference-perf-mlp-ddp-1x2-32", "data_wait")]
    assert math.isnan(refused["value"])
    assert refused["refusal"] == "unstable: more launches tell"
    assert (metrics["metric"].value_counts()[["throughput", "step_p50"]] == 36).all()


def test_the_columns_stay_when_there_is_nothing_to_measure(build_run: Callable[..., Run]) -> None:
    assert list(metrics_table(build_run({})).columns) == list(METRIC_COLUMNS)


def test_what_was_measured_and_not_examined_is_not_missing(build_measured_run: Callable[..., Run]) -> None:
    run = build_measured_run()
    assert not run.incomplete
    assert set(cell_table(run)["workload"]) == {"mlp"}
    assert "missing" not in support_page(run).partition("- `Y`")[0]


def test_a_program_reads_what_the_pages_say(realistic_run: Run, build_measured_run: Callable[..., Run]) -> None:
    told = json.loads(as_json(realistic_run))
    assert told["verdict"]["kind"] == "bad"
    assert told["outcomes"]["failed"] == 3
    assert len(told["cells"]) == len(realistic_run.header.planned)
    assert len(told["support"]) == len(support_table(realistic_run))
    assert told["failures"][0]["cause"] == "sum-instead-of-mean"
    assert len(told["failures"][0]["cells"]) == 3
    assert as_json(realistic_run).isascii()
    measured = json.loads(as_json(build_measured_run()))
    assert {claim["answer"] for claim in measured["claims"]} == {"needs a GPU"}
    assert any(row["metric"] == "throughput" and row["rank"] is None for row in measured["metrics"])


def test_an_infinite_number_is_a_word_for_a_program(realistic_run: Run, cells: list[Cell]) -> None:
    found = Finding("infinite", Outcome.FAILED, "", error_x_noise=math.inf)
    run = dataclasses.replace(realistic_run, results=(Result.of(cells[0], found, "", None),))
    told = json.loads(as_json(run))
    assert told["cells"][0]["error_x_noise"] == "inf"
    REPORT.validate(told)


def test_what_programs_read_is_as_its_schema_says(realistic_run: Run, build_measured_run: Callable[..., Run]) -> None:
    Draft202012Validator.check_schema(REPORT.schema)
    REPORT.validate(json.loads(as_json(build_measured_run(wrong=("dp",)))))
    told = json.loads(as_json(dataclasses.replace(realistic_run, results=realistic_run.results[-20:])))
    told["cells"] = told["cells"][-20:]
    REPORT.validate(told)
    assert not REPORT.is_valid({name: value for name, value in told.items() if name != "verdict"})
    assert not REPORT.is_valid({**told, "version": 2})
    assert not REPORT.is_valid({**told, "cells": [{**told["cells"][0], "outcome": "great"}]})


def test_no_run_no_report(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        write_report(tmp_path)


def test_a_report_needs_no_torch() -> None:
    code = "import sys, plumbline.report.formats, plumbline.report.terminal; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
