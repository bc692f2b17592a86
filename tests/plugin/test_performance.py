"""``pytest suites/performance`` measures cells with pytest-benchmark: it leaves figures on disk, and no verdicts."""

from __future__ import annotations

import json

import pytest

SMALL = ("--workloads", "perf-mlp", "--precisions", "32")
SUITE = ("suites/performance",)

BROKEN = """
from plumbline import subject

@subject(name="broken", backends=["none"])
def train(job):
    raise RuntimeError("there is nothing to train")
"""

EVERYWHERE = {
    "throughput", "throughput_per_gpu", "step_p50", "step_p95", "step_first", "data_wait", "overhead",
    "memory_private_peak", "tensors_parameters", "tensors_gradients", "tensors_optimizer", "tensors_activations",
    "share_compute", "share_exposed_communication", "share_data", "share_idle", "model_flops_per_gpu",
}  # fmt: skip
BETWEEN_RANKS = {"rank_skew", "communication"}
NOT_ON_A_CPU = {"mfu", "hfu", "energy_per_step", "energy_per_sample"}


def figures_of(run):
    found = {}
    for line in run.lines:
        if line["type"] == "measurement":
            found.setdefault((line["backend"], line["gpus"]), set()).add(line["metric"])
    return {cell: metrics - {"scaling_weak"} for cell, metrics in found.items()}


@pytest.fixture
def measured(project):
    """Run the suite in its own process; return pytest's result and the run's records."""

    def measured(*arguments, suites=SUITE, report_dir="reports"):
        result = project.pytest(*SMALL, *arguments, suites=suites, fresh=True)
        return result, project.run_in(report_dir)

    return measured


def test_cells_are_measured_and_figures_are_left(project, measured):
    result, run = measured("--gpus", "2", "--benchmark-json", "benchmark.json")
    assert result.ret == 0
    assert figures_of(run) == {
        ("none", 1): EVERYWHERE,
        ("dp", 2): EVERYWHERE,
        ("ddp", 2): EVERYWHERE | BETWEEN_RANKS,
    }
    assert {line["check"] for line in run.results} == {"performance"}
    assert {line["outcome"] for line in run.results} <= {"passed", "skipped"}
    assert run.footer is not None
    planned = run.lines[0]["planned"]
    assert len(planned) == 3
    assert all(cell["measured"] for cell in planned)
    for line in run.lines:
        if line["type"] == "measurement":
            assert (line["value"] is None) == (line["refusal"] is not None)
            assert len(line["samples"]) == 3
    result.stdout.fnmatch_lines(["*speed*", "*simulated*", "*hand-written loop*", "*perf-mlp ddp 1x2 32*"])

    benchmarks = json.loads((project.root / "benchmark.json").read_text())["benchmarks"]
    assert len(benchmarks) == 3
    for benchmark in benchmarks:
        assert benchmark["stats"]["rounds"] == 3 * 4, "a round of pytest-benchmark is a round of steps"
        assert benchmark["extra_info"]["throughput"]["unit"] == "samples/s"


def test_speed_is_no_conformance(measured):
    both = ("suites/conformance", *SUITE)
    arguments = ("--gpus", "1", "--workloads", "mlp,perf-mlp")
    result, run = measured(*arguments, suites=both)
    assert result.ret == 0
    assert {line["check"] for line in run.results} > {"performance", "gradients"}
    rows = [line for line in run.table.splitlines() if "Trainer(gpus=1)" in line]
    assert len(rows) == 1
    assert "1/1" in rows[0], "the cell that was measured is none that passed"


def test_who_does_not_ask_for_figures_measures_nothing(project):
    result = project.pytest(*SMALL, "--gpus", "1", "--collect-only", "-q")
    assert "perf-" not in result.stdout.str()
    result = project.pytest(*SMALL, "--gpus", "1", "--collect-only", "-q", suites=SUITE)
    result.stdout.fnmatch_lines(["*test_cell?reference-perf-mlp-none-1x1-32?*"])


def test_two_workers_measure_what_one_process_measures(project, measured):
    result, run = measured("--gpus", "2", "-n", "2", "-k", "none or ddp", "--profile")
    assert result.ret == 0
    assert figures_of(run) == {("none", 1): EVERYWHERE, ("ddp", 2): EVERYWHERE | BETWEEN_RANKS}
    assert run.footer is not None
    files = [file for result in run.results for file in result["profile"]["files"]]
    assert len(files) == 1 + 2, "a trace a rank"
    assert all((project.root / "reports" / "latest" / file).stat().st_size for file in files)
    assert {metric for result in run.results for metric in result["not_applicable"]} == NOT_ON_A_CPU


def test_a_trainer_that_raises_is_red_with_its_words(project, measured):
    (project.root / "broken.py").write_text(BROKEN)
    result, run = measured("--gpus", "1", "--subject", "broken.py")
    assert result.ret == 1
    (found,) = run.results
    assert (found["check"], found["outcome"]) == ("performance", "errored")
    result.stdout.fnmatch_lines(
        ["*broken-perf-mlp-none-1x1-32 errored*", "*there is nothing to train*", "*reproduce: *"]
    )
    assert figures_of(run) == {}
    assert run.traces == ["broken-perf-mlp-none-1x1-32"]
    assert (project.root / "reports" / "latest" / "traces" / run.traces[0] / "rank-0.log").is_file()


def test_too_few_launches_are_refused_before_anything_runs(project):
    result = project.pytest("--gpus", "1", "--launches", "2", suites=SUITE)
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--launches 2: at least 3 launches are needed*"])
    assert not list(project.root.glob("reports/*"))
