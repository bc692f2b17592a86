"""A user's workload from a file is trained, judged, resumed and judged again like a built-in one."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from plumbline.cli.main import main

WORKLOAD = (Path(__file__).parents[1] / "own_workloads" / "mine.py").read_text()

VACUOUS = """

class ZeroGradient(Mine):
    name = "zero-gradient"

    def loss(self, outputs, batch):
        return (outputs * 0).mean()


class Still(Mine):
    name = "still"

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.0)


class EqualShares(Mine):
    name = "equal-shares"

    def columns(self, count, generator):
        return {"x": torch.ones(count, 5), "y": torch.zeros(count, dtype=torch.long)}
"""

STARTING = Path(__file__).parents[1] / "launch" / "subjects" / "reference_starting.py"
pytestmark = pytest.mark.usefixtures("workloads_as_before")
CELL = ("--gpus", "2", "--precisions", "32", "--backends", "ddp", "--cell")


@pytest.fixture
def asked(project, monkeypatch):
    """The options for one cell of the workload in ``mine.py``, with a wrong trainer."""
    (project.root / "mine.py").write_text(WORKLOAD)
    monkeypatch.chdir(project.root)
    trainer = project.trainer("doubled.py", factor="2")
    return ("--workload", "mine.py", "--subject", trainer, *CELL, "doubled-mine-ddp-1x2-32")


def test_a_wrong_trainer_is_caught_and_its_run_judged_again_with_the_file_alone(project, asked, capsys):
    outcome = project.pytest(*asked)
    assert outcome.ret == 1
    run = project.run
    assert run.outcomes["doubled", "mine", "ddp", 1, 2, "32", "gradients"] == "failed"
    (command,) = {result["reproduce"] for result in run.results}
    words = shlex.split(command)
    for option, value in (("--subject", "doubled.py"), ("--workload", "mine.py")):
        assert words[words.index(option) + 1] == value
    assert run.lines[0]["workloads"]["mine"]["locator"] == "mine.py"

    def judged(*words):
        capsys.readouterr()
        code = main(["judge", "reports/latest", *words])
        return code, capsys.readouterr().out

    assert judged()[0] == 2
    assert "'mine' is not a built-in workload" in judged()[1]
    assert "--workload mine.py" in judged()[1]
    there = ("--workload", "mine.py")
    assert "1 cell judged again: 1 unchanged" in judged(*there)[1]
    assert main(["show", "reports/latest", "mine"]) == 0
    assert "--workload mine.py" in capsys.readouterr().out
    (project.root / "elsewhere").mkdir()
    shutil.move(project.root / "mine.py", project.root / "elsewhere" / "mine.py")
    assert judged(*there)[0] == 4
    assert "1 cell judged again: 1 unchanged" in judged("--workload", "elsewhere/mine.py")[1]
    (project.root / "mine.py").write_text(WORKLOAD.replace("randint(3", "randint(2"))
    assert "not judged again: mine.py has changed since the run was recorded" in judged(*there)[1]
    project.pytest(*asked, "--resume").stderr.fnmatch_lines(["*--resume: mine.py has changed since*begin a new run"])


def test_a_workload_that_shows_nothing_is_vacuous(project, monkeypatch):
    monkeypatch.chdir(project.root)
    (project.root / "mine.py").write_text(WORKLOAD + VACUOUS)
    names = ("zero-gradient", "still", "equal-shares")
    only = [word for name in names for word in ("--workload", f"mine.py::{name}")]
    cells = [word for name in names for word in ("--cell", f"right-{name}-ddp-1x2-32")]
    right = project.trainer("right.py")
    assert project.pytest(*only, "--subject", right, *CELL[:-1], *cells).ret == 1
    ended = {(key[1], key[-1]): outcome for key, outcome in project.run.outcomes.items()}
    checks = {"zero-gradient": "gradients", "still": "update", "equal-shares": "gradients"}
    for name in names:
        assert ended[name, checks[name]] == "errored", ended
    messages = {(r["workload"], r["check"]): r["message"] for r in project.run.results}
    vacuous = "vacuous (this check could not have failed): "
    assert messages["zero-gradient", "gradients"] == f"{vacuous}every gradient is zero"
    assert messages["still", "update"] == f"{vacuous}no weight moved at any step"
    assert messages["equal-shares", "gradients"].startswith(f"{vacuous}all shares have the same gradient")


@pytest.mark.parametrize(
    "words",
    [
        ("-n", "2"),
        ("--launcher", "torchrun"),
        ("--launcher", "hosts", "--node-command", "env -C / NODE={node}", "--listen", "127.0.0.1"),
        ("--subject", f"{STARTING}::forking"),
        ("--subject", f"{STARTING}::spawning"),
        ("--subject", f"torch;python={sys.executable}"),
    ],
    ids=["xdist", "torchrun", "hosts", "forking", "spawning", "interpreter"],
)
def test_it_reaches_every_process(project, monkeypatch, words):
    (project.root / "mine.py").write_text(WORKLOAD)
    monkeypatch.chdir(project.root)
    outcome = project.pytest("--workload", "mine.py", *CELL[:-1], *words, fresh=True)
    assert outcome.ret == 0
    assert outcome.parseoutcomes()["passed"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workload", "none.py"), "*--workload none.py: file none.py not found*"),
        (("--workload", "mine.py", "--workloads", "mine"), "*use --workload mine.py::mine*"),
        (("--workload", "mine.py", "--workloads", "mlpp"), "*unknown workload 'mlpp': did you mean 'mlp'?*"),
    ],
)
def test_bad_input_is_a_sentence_before_anything_starts(project, monkeypatch, words, said):
    monkeypatch.chdir(project.root)
    (project.root / "mine.py").write_text(WORKLOAD)
    outcome = project.pytest(*words)
    assert outcome.ret == pytest.ExitCode.USAGE_ERROR
    outcome.stderr.fnmatch_lines([said])
    assert not (project.root / "reports").exists() or not list((project.root / "reports").iterdir())
