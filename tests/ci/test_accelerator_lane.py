"""The accelerator lane's logic, with stand-ins for its stages; no GPU is needed or used."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lane_modules():
    """Import the lane's modules from ``ci/``, and remove them afterwards."""
    sys.path.insert(0, str(ROOT / "ci"))
    import accelerator_lane.command
    import accelerator_lane.environment
    import accelerator_lane.lane
    import accelerator_lane.machine
    import accelerator_lane.report
    import accelerator_lane.stage
    import accelerator_lane.stages

    yield accelerator_lane
    sys.path.remove(str(ROOT / "ci"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerator_lane"]:
        del sys.modules[name]


@pytest.fixture
def stage(lane_modules):
    def make(name, script, limit_s=60.0, **options):
        return lane_modules.stage.Stage(name, f"why {name}", ("sh", "-c", script), limit_s, **options)

    return make


@pytest.fixture
def lane(lane_modules, tmp_path):
    def make(*stages, **options):
        folder = tmp_path / "reports" / "cuda-here"
        told = {"GPUs": "1 × none", "torch": "2"}
        environment = {"PATH": "/usr/bin:/bin"}
        report = tmp_path / "reports" / "cuda-here.md"
        said = options.pop("said", [])
        return lane_modules.lane.Lane(
            "cuda-here", stages, folder, report, tmp_path, environment, told, say=said.append, **options
        )

    return make


def outcomes(results):
    return {name: result.outcome for name, result in results.items()}


def test_stages_go_on_after_a_failure_and_the_report_has_its_text(lane, stage):
    broken = "echo '= FAILURES ='; echo 'assert 1 == 2'; echo '=== 1 failed, 3 passed in 0.12s ==='; exit 1"
    tried = lane(stage("one", broken), stage("two", "echo well"))
    results = tried.run(60)
    assert outcomes(results) == {"one": "failed", "two": "passed"}
    assert (results["one"].exit_code, results["one"].counts) == (1, {"failed": 1, "passed": 3})
    page = tried.report.read_text()
    assert "| torch | 2 |" in page
    assert "| one | failed (1) |" in page
    assert "1 failed, 3 passed" in page
    assert "assert 1 == 2" in page
    assert "echo well" in page


def test_the_report_is_there_before_the_next_stage_begins(lane, stage, tmp_path):
    results = lane(stage("one", "exit 7"), stage("two", "grep 'one | failed (7)' reports/cuda-here.md")).run(60)
    assert outcomes(results) == {"one": "failed", "two": "passed"}


def test_a_program_that_is_not_there_is_a_result_too(lane, lane_modules, stage):
    gone = lane_modules.stage.Stage("gone", "", ("no-such-program",), 5)
    results = lane(gone, stage("two", "true")).run(60)
    assert outcomes(results) == {"gone": "could not start", "two": "passed"}


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_at_its_limit_a_stage_ends_with_all_that_it_started(lane, lane_modules, stage, tmp_path, monkeypatch):
    monkeypatch.setattr(lane_modules.stage, "GRACE_S", (0.2, 0.2))
    script = "trap '' INT TERM; setsid sleep 1000 & echo $! > pid; while true; do sleep 1000; done"
    results = lane(stage("hangs", script, 5.0), stage("two", "true"), least_s=0.1).run(60)
    assert outcomes(results) == {"hangs": "timed out", "two": "passed"}
    assert results["hangs"].left_behind >= 1
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


@pytest.mark.nightly
def test_a_stage_that_heeds_the_interrupt_says_how_far_it_came(lane, stage):
    script = "trap 'echo \"=== 4 passed in 1s ===\"; exit 2' INT; while true; do sleep 0.1; done"
    results = lane(stage("long", script, 5.0), least_s=0.1).run(60)
    assert (results["long"].outcome, results["long"].exit_code, results["long"].counts) == (
        "timed out",
        2,
        {"passed": 4},
    )


@pytest.mark.nightly
def test_where_the_time_ends_the_rest_is_due_and_a_resumed_lane_runs_that_alone(lane, stage, tmp_path):
    count = "echo x >> {name}.times; [ -e go ] || while true; do sleep 0.1; done"
    stages = [
        stage("one", "echo x >> one.times"),
        stage("two", count.format(name="two")),
        stage("three", "echo x >> three.times"),
    ]
    first = lane(*stages, least_s=2.0).run(10.0)
    assert outcomes(first) == {"one": "passed", "two": "cut", "three": "not reached"}
    (tmp_path / "go").touch()
    second = lane(*stages, least_s=2.0).run(60, resume=True)
    assert outcomes(second) == {"one": "passed", "two": "passed", "three": "passed"}
    times = {name: (tmp_path / f"{name}.times").read_text().count("x") for name in ("one", "two", "three")}
    assert times == {"one": 1, "two": 2, "three": 1}
    assert second["two"].seconds > first["two"].seconds


@pytest.mark.nightly
def test_a_stage_that_is_cut_again_and_again_comes_to_its_own_limit(lane, stage):
    endless = stage("endless", "while true; do sleep 0.1; done", 8.0)
    assert outcomes(lane(endless, least_s=0.1).run(5.0)) == {"endless": "cut"}
    assert outcomes(lane(endless, least_s=0.1).run(60, resume=True)) == {"endless": "timed out"}


@pytest.mark.nightly
def test_a_suite_that_was_cut_is_continued_in_its_own_run(lane, lane_modules):
    script = 'mkdir -p "$2/run"; touch "$2/run/results.jsonl"; [ "$3" = --resume ] || while true; do sleep 0.1; done'
    suite = lane_modules.stage.Stage("suite", "", ("sh", "-c", script, "suite"), 60, suite=True)
    assert outcomes(lane(suite, least_s=0.1).run(5.0)) == {"suite": "cut"}
    assert outcomes(lane(suite, least_s=0.1).run(60, resume=True)) == {"suite": "passed"}


def test_only_some_stages(lane, stage):
    assert outcomes(lane(stage("one", "true"), stage("two", "true")).run(60, ["two"])) == {"two": "passed"}


def test_an_archive_takes_results_to_another_machine(lane, lane_modules, stage, tmp_path):
    out = tmp_path / "out"
    stages = [stage("one", "echo x >> one.times"), stage("two", "exit 1")]
    tried = lane(*stages, out=out)
    tried.run(60, ["one"])
    assert sorted(path.name for path in out.iterdir()) == ["cuda-here.md", "cuda-here.tar.gz"]
    elsewhere = tmp_path / "elsewhere"
    lane_modules.lane.unpack(out / "cuda-here.tar.gz", elsewhere)
    tried.folder = elsewhere
    assert outcomes(tried.run(60, resume=True)) == {"one": "passed", "two": "failed"}
    assert (tmp_path / "one.times").read_text() == "x\n"


def test_an_archive_that_is_none_of_the_lanes_is_refused(lane_modules, tmp_path):
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as packed:
        packed.add(__file__, arcname="../outside.py")
    with pytest.raises(ValueError, match="not an archive of the lane"):
        lane_modules.lane.unpack(tmp_path / "bad.tar.gz", tmp_path / "inside")
    assert not (tmp_path / "outside.py").exists()


def test_what_is_large_is_left_out_of_the_archive_after_logs_and_results(lane_modules, tmp_path):
    folder = tmp_path / "folder"
    (folder / "main" / "traces").mkdir(parents=True)
    for number in range(3):
        content = b"".join((i * 2654435761 + number & 0xFFFFFFFF).to_bytes(4, "little") for i in range(50_000))
        (folder / "main" / "traces" / f"{number}.safetensors").write_bytes(content)
    (folder / "main.log").write_text("log")
    lane_modules.lane.pack(folder, tmp_path / "packed.tar.gz", most=150_000)
    with tarfile.open(tmp_path / "packed.tar.gz") as packed:
        names = packed.getnames()
    assert names[0] == "main.log"
    assert 1 < len(names) < 4


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_stages_fit_into_forty_minutes(lane_modules, gpus):
    every = frozenset({"lightning", "accelerate", "transformers", "ignite"})
    planned = lane_modules.stages.stages(gpus, every)
    assert sum(stage.limit_s for stage in planned) <= 40 * 60
    assert len({stage.name for stage in planned}) == len(planned)


def test_what_is_about_cuda_is_not_run_on_another_type_of_device(lane_modules):
    planned = lane_modules.stages.stages(2, accelerator="xpu")
    assert not {"cuda-tests", "claims"} & {stage.name for stage in planned}
    assert all("cuda" not in stage.command for stage in planned)
    suites = [stage for stage in planned if stage.suite]
    assert suites
    assert all(stage.command[stage.command.index("--accelerator") + 1] == "xpu" for stage in suites)


def test_without_a_device_it_says_what_it_would_do_and_runs_nothing(lane_modules, monkeypatch, capsys):
    monkeypatch.setattr(lane_modules.command, "nvidia_gpus", list)
    monkeypatch.setattr(lane_modules.command, "prepare", None)
    assert lane_modules.command.main([]) == 3
    told = capsys.readouterr().out
    assert "no CUDA device" in told
    assert "pytest suites/conformance" in told
    assert "--oversubscribe" in told
    assert lane_modules.command.main(["--dry-run", "--only", "doctor"]) == 0
    assert "1 stages" in capsys.readouterr().out


def test_an_interpreter_that_sees_no_device_says_why(lane_modules, monkeypatch, capsys):
    asked = {"torch": "2.13.0+cpu", "cuda": None, "gpus": 0}
    monkeypatch.setattr(lane_modules.command, "ask_torch", lambda python, **options: asked)
    assert lane_modules.command.main(["--python", sys.executable]) == 3
    assert "torch 2.13.0+cpu, built for CUDA None, sees none" in capsys.readouterr().out
    assert lane_modules.command.main(["--python", sys.executable, "--accelerator", "xpu"]) == 3
    assert "torch finds no xpu device" in capsys.readouterr().out


def test_a_stage_that_does_not_exist_is_refused_with_those_that_do(lane_modules, capsys):
    assert lane_modules.command.main(["--only", "perf"]) == 2
    assert "there are doctor, smoke" in capsys.readouterr().err


def test_the_exit_code_says_whether_something_failed_or_is_due(lane_modules):
    code_of, made = lane_modules.command.code_of, lane_modules.stage.StageResult
    good, bad, due = made("a", "passed"), made("b", "timed out"), made("c", "cut")
    assert code_of({"a": good}, ["a"]) == 0
    assert code_of({"a": good, "b": bad, "c": due}, ["a", "b", "c"]) == 1
    assert code_of({"a": good, "c": due}, ["a", "c"]) == 4
    assert code_of({"a": good}, ["a", "c"]) == 4


def test_a_machine_is_described_and_named_after_its_devices(lane_modules, monkeypatch):
    monkeypatch.setattr(lane_modules.machine, "nvidia_gpus", lambda: [["NVIDIA X", "1 MiB", "580.1", "Default"]] * 2)
    told = {
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "nccl": "2.28",
        "gpus": 2,
        "devices": ["NVIDIA X, 1 MiB, sm_90"] * 2,
    }
    found = lane_modules.machine.describe(told, "abc123")
    assert found["GPUs"] == "2 × NVIDIA X, 1 MiB, sm_90"
    assert (found["driver"], found["NCCL"], found["commit"]) == ("580.1", "2.28", "abc123")
    assert lane_modules.machine.name_of(told) == "2x-nvidia-x"


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("=== 4 passed, 206 deselected in 18.54s ===", {"passed": 4, "deselected": 206}),
        ("\x1b[31m= \x1b[1m1 failed\x1b[0m, 2 errors in 61.00s (0:01:01) =\x1b[0m", {"failed": 1, "errors": 2}),
        ("3 skipped in 0.1s", {"skipped": 3}),
        ("4 cells: 4 passed. Devices: simulated.", {}),
    ],
)
def test_counts_are_those_of_pytests_last_line(lane_modules, line, counts):
    assert lane_modules.stage.counts_in(f"before\n{line}\n") == counts


def test_an_environment_beside_an_interpreter_has_its_packages_and_the_checkout(lane_modules, tmp_path):
    """Like on a machine without a package index: nothing is downloaded, and the interpreter is unchanged."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("pyproject.toml", "CITATION.cff", "harness"):
        (root / name).symlink_to(ROOT / name)
    made = lane_modules.environment.prepare(root, sys.executable, None, lambda text: None)
    script = "import plumbline, torch, json, sys; from importlib.metadata import entry_points as e;"
    script += "print(json.dumps([plumbline.__file__, sorted(one.name for one in e(group='pytest11')), sys.prefix]))"
    done = subprocess.run([made.python, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    file, plugins, prefix = json.loads(done.stdout)
    assert Path(file).resolve() == ROOT / "harness" / "plumbline" / "__init__.py"
    assert Path(file).is_relative_to(root)
    assert Path(prefix) == root / ".venv-accelerator"
    assert (made.bin / "pytest").exists()
    assert made.variables["PATH"].startswith(str(made.bin))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project.get("entry-points", {}).get("pytest11", {})) <= set(plugins)


def test_an_interpreter_that_is_not_there_is_refused(lane_modules, tmp_path):
    with pytest.raises(lane_modules.environment.CannotPrepare, match="no such program"):
        lane_modules.environment.prepare(tmp_path, "no-such-python", None, lambda text: None)
