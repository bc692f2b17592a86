"""``plumbline compare --interleave``: two trainers measured in turns by real ranks, and the resulting runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plumbline.cli.main import main
from plumbline.results.run import read_run

TRAINERS = Path(__file__).parent / "trainers.py"
ASKED = ("--accelerator", "cpu", "--gpus", "1", "--workloads", "perf-mlp", "--precisions", "32", "--launches", "3")


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory):
    """Measures two trainers; returns the exit code, and both runs by the subject's name."""

    def call(a, b):
        folder = tmp_path_factory.mktemp("reports")
        words = [f"{TRAINERS}::{name}" for name in (a, b)]
        code = main(["compare", "--interleave", *words, *ASKED, "--report-dir", str(folder), "--format", "json"])
        runs = [read_run(path) for path in folder.iterdir() if not path.is_symlink()]
        return code, {run.header.planned[0].subject: run for run in runs}

    return call


@pytest.fixture(scope="module")
def measured(interleaved):
    return interleaved("plain", "burdened")


def test_half_a_gibibyte_more_is_found(measured):
    """Memory instead of time, so that the machine's other work does not matter."""
    assert measured[0] == 3


def test_both_runs_are_whole_and_say_that_they_belong_together(measured):
    _, runs = measured
    assert runs.keys() == {"plain", "burdened"}
    assert not any(run.incomplete for run in runs.values())
    tokens = [run.header.options["in_turns"] for run in runs.values()]
    assert tokens[0] == tokens[1]
    assert runs["plain"].header.fingerprint == runs["burdened"].header.fingerprint


def test_each_launch_is_a_sample(measured):
    for run in measured[1].values():
        figures = {figure.metric: figure for figure in run.measurements}
        assert len(figures["throughput"].samples) == 3
        assert figures["throughput"].workload_key


def test_the_runs_can_be_compared_again_and_are_still_pairs(measured, capsys):
    _, runs = measured
    assert main(["compare", *(str(runs[name].path) for name in ("plain", "burdened")), "--format", "json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["turns"] is True
    figures = {figure["metric"]: figure for figure in found["figures"]}
    assert figures["memory_private_peak"]["verdict"] == "worse"


def test_a_trainer_that_goes_wrong_is_newly_failing_and_the_other_was_not_measured(interleaved):
    code, runs = interleaved("plain", "raising")
    assert code == 1
    (wrong,), (other,) = runs["raising"].results, runs["plain"].results
    assert wrong.outcome.is_bad
    assert "not today" in wrong.message
    assert other.outcome.value == "skipped"
    assert not any(run.measurements for run in runs.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((f"{TRAINERS}::plain", f"{TRAINERS}::elsewhere"), "the trainers have no measured cell in common"),
        ((f"{TRAINERS}::plain", str(TRAINERS)), "has several trainers"),
        ((f"{TRAINERS}::plain",), "two subjects"),
        ((f"{TRAINERS}::plain", f"{TRAINERS}::plain", "--launches", "2"), "at least 3 launches"),
        ((f"{TRAINERS}::plain", f"{TRAINERS}::plain", "--workloads", "perf-tap-dance"), "perf-tap-dance"),
    ],
)
def test_what_cannot_be_meant_is_usage(words, said, capsys, tmp_path):
    asked = [*ASKED, "--report-dir", str(tmp_path)]
    assert main(["compare", "--interleave", *asked, *words]) == 4
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
