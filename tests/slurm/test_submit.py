"""``plumbline submit`` on a real cluster: many tasks make one run, whatever happens to them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from plumbline.cli.main import main
from plumbline.results.run import read_run
from plumbline.submit.engines.slurm import SlurmEngine
from plumbline.submit.follow import Follower
from plumbline.submit.submission import Submission, SubmitRequest, prepare

ROOT = Path(__file__).parents[2]
GATED = Path(__file__).parent / "subjects" / "gated.py"
CELLS = {"gated-mlp-none-1x1-32", "gated-mlp-ddp-2x1-32"}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A submission of two cells, one of which waits for a gate, in one task; nothing is sent."""
    words = (str(ROOT / "suites" / "conformance"), "--subject", str(GATED), "--workloads", "mlp")
    words += ("--precisions", "32", "--backends", "none,ddp", "-p", "no:cacheprovider")
    asked = SubmitRequest(
        engine=SlurmEngine(time="00:05:00"),
        nodes=2,
        gpus=1,
        accelerator="cpu",
        report_dir=tmp_path_factory.mktemp("planned"),
        pytest=words,
    )
    submission = prepare(asked, ("plumbline", "submit"))
    assert {cell.cell for cell in submission.cells} == CELLS
    return submission


@pytest.fixture
def submission(cluster, planned, tmp_path):
    """Return a submission in its own folder, and its gate."""
    gate = tmp_path / "gate"
    engine = replace(planned.engine, environment={"GATE": str(gate)})
    made = replace(planned, run=tmp_path / planned.run.name, engine=engine)
    made.save()
    return made, gate


class AnyFinding(list):
    """A follower's output; ``at`` acts once, when a line contains certain words."""

    def __init__(self):
        self.waiting = []

    def at(self, said, do):
        self.waiting.append((said, do))
        return self

    def __call__(self, line):
        self.append(line)
        for one in [one for one in self.waiting if re.search(one[0], line)]:
            self.waiting.remove(one)
            one[1]()


def follow(submission, told):
    """Follow a submission to its end, within a generous time limit."""
    run = Follower(submission, told).follow()
    assert not told.waiting, f"it never said {told.waiting}: {told}"
    return run


def ends_of(run):
    return {result.cell: result.outcome.value for result in run.results if result.outcome.value != "passed"}


def test_a_task_is_cancelled_and_what_it_left_is_examined_when_somebody_attaches(cluster, submission, capsys):
    made, gate = submission
    told = AnyFinding().at("1 of 2 cells; tasks: 1 running", lambda: cluster.ask("scancel", str(made.jobs()[0])))
    run = follow(made, told)
    assert run.incomplete
    assert {result.cell for result in run.results} == {"gated-mlp-none-1x1-32"}
    assert not ends_of(run), "what SLURM ended is no finding about the trainer"
    assert re.search(r"task 0: job \d+_0 was cancelled; 1 cell not examined", "\n".join(told))

    gate.touch()
    assert main(["submit", "--attach", str(made.run)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"job \d+: 1 cell in 1 task\n", said), "only what is missing is sent"
    run = read_run(made.run)
    assert not run.incomplete
    assert {result.cell for result in run.results} == CELLS
    assert run.footer.exit_status == 0
    assert "reports" not in {place.name for place in made.run.iterdir()}
    assert main(["submit", "--attach", str(made.run)]) == 0, "a run that is complete is shown again"
    assert "job" not in capsys.readouterr().out.replace("jobs", "")


def test_a_task_that_is_preempted_is_sent_again_with_what_it_left(cluster, submission):
    made, gate = submission

    def more_urgent():
        done = subprocess.run(
            ["srun", "--quiet", "--partition=urgent", "--nodes=3", "--exclusive", "touch", str(gate)], check=False
        )
        assert done.returncode == 0

    told = AnyFinding().at("1 of 2 cells; tasks: 1 running", more_urgent)
    run = follow(made, told)
    assert "task 0 (preempted) left 1 cell unfinished: resubmitting" in told
    assert not run.incomplete
    assert not ends_of(run)
    assert [line for line in told if line.startswith("job ")][1].endswith("1 cell in 1 task")


def test_nodes_that_are_drained_are_given_as_the_reason_for_waiting(cluster, submission):
    made, gate = submission
    gate.touch()
    nodes = "nodename=node2,node3"
    cluster.ask("scontrol", "update", nodes, "state=drain", "reason=a fan is loud")
    told = AnyFinding().at(
        "1 pending .*(DRAINED|UnavailableNodes)", lambda: cluster.ask("scontrol", "update", nodes, "state=resume")
    )
    try:
        run = follow(made, told)
    finally:
        cluster.ask("scontrol", "update", nodes, "state=resume", check=False)
    assert not run.incomplete
    assert not ends_of(run)


def test_a_task_that_never_gets_anywhere_is_given_up_with_its_log(cluster, submission):
    made, _ = submission
    told = AnyFinding()
    broken = replace(made, engine=replace(made.engine, modules=("a-module-that-is-nowhere",)))
    assert follow(broken, told) is None
    assert re.search(
        r"task 0: ended twice \(FAILED\) without examining another cell; 2 cells not examined: see", told[-1]
    )
    log = Path(told[-1].rpartition("see ")[2])
    assert "module" in log.read_text()


def test_two_tasks_make_one_run(cluster, submission, tmp_path):
    made, gate = submission
    gate.touch()
    cells = [cell.cell for cell in made.cells]
    made = replace(made, tasks=((cells[0],), (cells[1],)))
    told = AnyFinding()
    run = follow(made, told)
    assert [line for line in told if line.startswith("job ")] == [f"job {made.jobs()[1]}: 2 cells in 2 tasks"], told
    assert not run.incomplete
    assert [planned.cell for planned in run.header.planned] == cells
    assert run.header.run_id == made.run.name
    assert list(dict.fromkeys(result.cell for result in run.results)) == cells


def test_a_dry_run_shows_the_script_and_sends_nothing(cluster, tmp_path, capsys):
    words = ["--nodes", "12", "--gpus", "8", "--partition", "main", "--time", "02:00:00", "--module", "NCCL/2.4.7"]
    words += ["--env", "NCCL_SOCKET_IFNAME=^docker0,lo", "--array", "4", "--report-dir", str(tmp_path), "--dry-run"]
    suite = str(ROOT / "suites" / "conformance")
    assert main(["submit", *words, "--", suite, "--workloads", "mlp", "--precisions", "32"]) == 0
    script = capsys.readouterr().out
    for line in (
        *("#SBATCH --nodes=12", "#SBATCH --gpus-per-node=8", "#SBATCH --partition=main", "#SBATCH --time=02:00:00"),
        *("#SBATCH --array=0-3", "module load NCCL/2.4.7 || exit", "export NCCL_SOCKET_IFNAME='^docker0,lo'"),
    ):
        assert line in script.splitlines()
    assert "CUDA_VISIBLE_DEVICES" not in script
    assert "--launcher slurm" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert list(tmp_path.iterdir()) == []
    assert cluster.ask("squeue", "-h", "-p", "main").strip() == ""


def test_who_attaches_to_what_nobody_submitted_is_told(tmp_path, capsys):
    assert main(["submit", "--attach", str(tmp_path)]) == 2
    assert "was not made by `plumbline submit`" in capsys.readouterr().err
    assert main(["submit", "--gpus", "2"]) == 4
    assert "give --nodes and --gpus" in capsys.readouterr().err


def test_a_submission_is_read_back_as_it_was(planned, tmp_path):
    made = replace(planned, run=tmp_path / "run")
    made.save()
    assert Submission.load(tmp_path / "latest") == made
