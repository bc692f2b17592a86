"""A new backend needs one file: it is planned, launched, judged, and has a column in the report."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd

from plumbline.core.invocation import suites
from plumbline.core.outcome import Outcome, worst
from plumbline.core.training_behavior import EVERY_OTHER
from plumbline.engine.smoke import cells_of
from plumbline.planning.declaration import Declaration
from plumbline.planning.plan import Matrix, plan
from plumbline.report.tables.support import mark_columns


def test_it_is_planned_where_it_fits(outside):
    outside("backend")
    able = Declaration("gathers", "backend.py", ("gather",), {EVERY_OTHER: ("32",)}, frozenset())
    planned = plan(Matrix(4, workloads=("mlp",), precisions=("32",)), [able])
    assert {str(one.cell.topology) for one in planned if one.refusal is None} == {"1x2", "1x3", "1x4", "2x1", "2x2"}
    assert any(one.is_smoke for one in planned)
    (smoke,) = cells_of({"name": "gathers", "backends": ["gather"], "precisions": {"cpu": ["32"]}}, "cpu")
    assert (smoke.backend, str(smoke.topology), smoke.processes) == ("gather", "1x2", 2)
    assert mark_columns()[-3:] == ("GATHER", "Nodes", "16-bit")


def test_it_is_launched_and_judged(outside, trained):
    findings = trained(outside("backend"), "gathers", "mlp", "gather", "1x2")
    assert {"samples", "gradients", "update", "ranks-agree"} <= findings.keys()
    assert worst(finding.outcome for finding in findings.values()) is Outcome.PASSED, findings


def test_a_run_of_the_suite_needs_only_its_file(outside, tmp_path):
    """The file is named twice: ``--subject`` is for the ranks, and ``-p`` for the process that plans and reports."""
    file = outside("backend")
    options = ["--gpus", "2", "--workloads", "mlp", "--precisions", "32", "--backends", "gather"]
    command = [sys.executable, "-m", "pytest", str(suites() / "conformance"), "-q", "-p", file.stem, *options]
    command += ["--subject", str(file), "--report-dir", str(tmp_path), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "latest" / "results.jsonl").read_text().splitlines()]
    results = [record for record in records if record["type"] == "result"]
    assert {(record["backend"], record["outcome"]) for record in results} == {("gather", "passed")}
    table = pd.read_csv(tmp_path / "latest" / "support.csv")
    assert list(table["GATHER"]) == ["Y", "Y"], "on one node, and on two"
