"""``plumbline check`` on real commands: the output, the exit code, and leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from plumbline.check.command.checked_command import START_FOLDER
from plumbline.cli.main import main

LOOP = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range({steps}):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(torch.randn(3, 4)), torch.zeros(3, 2)).backward()
    optimizer.step()
{after}
"""

TWO_RANKS = """
import multiprocessing
import sys


def train(rank, port):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(1000):
        optimizer.zero_grad()
        model.module(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        dist.barrier()


if __name__ == "__main__":
    start = multiprocessing.get_context("spawn").Process
    ranks = [start(target=train, args=(rank, int(sys.argv[1]))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    print("after training")
"""


TWICE = """
import sys
import tempfile

import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(rank, store, is_wrong):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(5):
        optimizer.zero_grad()
        (model.module if is_wrong else model)(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    dist.barrier()


if __name__ == "__main__":
    import multiprocessing

    start = multiprocessing.get_context("fork").Process
    for number in range(2):
        with tempfile.TemporaryDirectory() as folder:
            arguments = f"{folder}/store", sys.argv[1] == str(number)
            ranks = [start(target=train, args=(rank, *arguments)) for rank in range(2)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
"""


EPOCHS = """
import os
import signal
import sys


import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(96, 4), torch.randn(96, 2))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    for epoch in range(2):
        if sys.argv[2] == "set":
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    import multiprocessing

    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=train, args=(rank, int(sys.argv[1]))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


FORKED = """
import multiprocessing
import torch

def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.randn(3, 4)), torch.zeros(3, 2)).backward()
        optimizer.step()

rank = multiprocessing.get_context("fork").Process(target=train)
rank.start()
rank.join()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a script's folder, separate from the temporary folder."""
    for name in ("temporary", "script"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path / "script")
    yield tmp_path / "script"
    assert not list((tmp_path / "temporary").glob("plumbline-*")), "evidence was left behind"


@pytest.fixture
def check(folder, capfd, tmp_path):
    """Return a function that checks a script, and returns the exit code, its output, the verdict and the JSON file."""

    def check(text, *options, arguments=(), python=(sys.executable,)):
        (folder / "train.py").write_text(text)
        before = set(folder.iterdir())
        file = tmp_path / "verdict.json"
        code = main(["check", "--json", str(file), *options, "--", *python, "train.py", *arguments])
        assert {path for path in folder.iterdir() if path.name != "__pycache__"} == before, "something was left there"
        out, err = capfd.readouterr()
        return code, out, err, json.loads(file.read_text())

    return check


def said(text):
    return " ".join(text.split())


@pytest.mark.parametrize(("wrong", "code"), [("none", 0), ("0", 1), ("1", 1)])
def test_trainings_of_several_process_groups_are_judged_apart(check, wrong, code):
    found, out, _, verdict = check(TWICE, arguments=(wrong,))
    assert found == code, out
    assert [one["verdict"] for one in verdict["trainings"]] == [
        "wrong" if wrong == str(n) else "right" for n in range(2)
    ]


def test_a_right_script_keeps_its_output_and_its_surroundings(check, folder, monkeypatch):
    (folder / "own").mkdir()
    (folder / "own" / "sitecustomize.py").write_text("print('my own sitecustomize')")
    (folder / "own" / "harness.py").write_text("MINE = 'my own harness'")
    monkeypatch.setenv("PYTHONPATH", str(folder / "own"))
    after = "import harness, os, subprocess; print(harness.MINE); os.chdir('/'); subprocess.run(['echo', 'a child'])"
    code, out, err, written = check(LOOP.format(steps=5, after=after))
    assert out.splitlines() == ["my own sitecustomize", "my own harness", "a child"]
    assert said(err).startswith("RIGHT: 100 % of gradients and updates judged in 4 steps")
    assert code == written["script"]["exit_code"] == 0
    (training,) = written["trainings"]
    assert (training["ranks"], training["steps"], training["optimizers"]) == (1, 4, ["SGD"])
    assert training["coverage"]["replayed"] == 1


def test_a_script_that_fails_after_its_steps_is_judged_and_its_failure_is_said_first(check):
    code, _, err, written = check(LOOP.format(steps=2, after="raise SystemExit(5)"))
    assert "NOT JUDGED: the command failed: exit code 5; before that, 100 % of gradients and updates" in said(err)
    assert "! the script took only 2 of the 4 requested steps" in said(err)
    assert (code, written["script"]["exit_code"]) == (2, 5)


SPAWNED = """
import torch.multiprocessing


def train(rank):
    raise ValueError("no batches")


if __name__ == "__main__":
    torch.multiprocessing.spawn(train)
"""


def test_the_error_of_a_spawned_process_is_said_without_its_traceback(check):
    _, _, err, _ = check(SPAWNED)
    assert "exit code 1 (ProcessRaisedException: ValueError: no batches)" in said(err)


def test_a_forked_rank_that_takes_fewer_steps_leaves_its_last_evidence(check):
    _, _, err, _ = check(FORKED)
    assert said(err).startswith("RIGHT: 100 % of gradients and updates judged in 2 steps")
    assert "! the script took only 2 of the 4 requested steps" in said(err)
    assert "killed" not in err


def test_ranks_end_together_with_stop_and_the_mistake_is_in_the_first_line(check, free_port):
    code, out, err, written = check(TWO_RANKS, "--stop", "--steps", "2", "--after", "3", arguments=[str(free_port)])
    assert said(err).startswith("WRONG: gradients: not synchronised")
    assert out == "after training\n"
    assert code == 1
    assert written["script"] == {**written["script"], "exit_code": 0, "ended_by": "itself"}
    (training,) = written["trainings"]
    assert (training["ranks"], training["steps"]) == (2, 2)
    assert not tagged()


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        ("never", "WRONG: samples: set_epoch is never called"),
        pytest.param("set", "RIGHT: ", marks=pytest.mark.nightly),  # epochs are right by default in test_two_ranks.py
    ],
)
def test_epochs_are_watched_beyond_the_recorded_steps_until_the_process_is_killed(check, free_port, calls, sentence):
    _, _, err, _ = check(EPOCHS, "--steps", "2", arguments=[str(free_port), calls])
    assert said(err).startswith(sentence)


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def tagged():
    """Return processes with the environment of this test's check."""
    tag = f"PLUMBLINE_CHECK={os.environ['TMPDIR']}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if tag in (place / "environ").read_bytes():
                found.append(place.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("text", "sentence", "code"),
    [
        ("print('hello')", "NOT JUDGED: no process of the command imports torch", 0),
        ("1 / 0", "NOT JUDGED: the script failed before it imported torch: exit code 1 (ZeroDivisionError", 1),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "NOT JUDGED: the script failed before it imported torch: signal SIGKILL (process",
            -9,
        ),
        ("import os; os._exit(3)", "NOT JUDGED: the script failed before it imported torch: exit code 3", 3),
    ],
)
def test_a_script_that_cannot_be_judged_keeps_its_exit_code(check, text, sentence, code):
    verdict, _, err, written = check(text)
    assert sentence in said(err)
    assert (verdict, written["script"]["exit_code"]) == (2, code)


def test_the_traceback_of_a_script_stays(check):
    _, _, err, _ = check("1 / 0")
    assert "Traceback (most recent call last)" in err
    assert err.index("ZeroDivisionError") < err.index("NOT JUDGED")


def test_a_torch_that_is_too_old_is_named(check, folder, monkeypatch):
    (folder / "old").mkdir()
    (folder / "old" / "torch.py").write_text("__version__ = '2.3.1+cpu'")
    monkeypatch.setenv("PYTHONPATH", str(folder / "old"))
    _, _, err, _ = check("import torch")
    assert "NOT JUDGED: torch 2.3.1+cpu is too old: 2.4 is needed" in said(err)


def test_a_python_that_is_too_old_is_named(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.13.0'")
    start = (
        f"import sys, runpy; sys.version_info = (3, 9, 18); runpy.run_path({str(START_FOLDER / 'sitecustomize.py')!r})"
    )
    code = f"{start}; sys.path.insert(0, {str(tmp_path)!r}); import torch"
    subprocess.run([sys.executable, "-S", "-c", code], env={**os.environ, "PLUMBLINE_CHECK": str(tmp_path)}, check=True)
    (notes,) = tmp_path.glob("process-*")
    assert "Python 3.9 is too old: 3.10 is needed" in notes.read_text()


def test_python_that_reads_no_environment_is_said_where_it_cannot_be_seen_beforehand(check):
    _, _, err, _ = check("print(1)", python=("env", sys.executable, "-I"))
    assert "no Python process of the command loaded the recorder" in said(err)


def test_a_time_limit_ends_every_process_of_the_command(check):
    sleep = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code, _, err, written = check(sleep, "--time-limit", "2")
    assert "the command was ended at the time limit of 2 s before a process imported torch" in said(err)
    assert (code, written["script"]["ended_by"]) == (2, "time limit")
    assert not tagged()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["2", "15"])
def test_an_interrupted_check_ends_the_command_and_judges_what_was_recorded(folder, tmp_path, number):
    marker, file = tmp_path / "marker", tmp_path / "verdict.json"
    after = f"import pathlib, time; pathlib.Path({str(marker)!r}).touch(); time.sleep(600)"
    (folder / "train.py").write_text(LOOP.format(steps=3, after=after))
    words = [sys.executable, "-m", "plumbline.cli.main", "check", "--json", str(file), "--", sys.executable, "train.py"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        while not marker.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        err = process.communicate()[1]
    assert process.returncode == 130
    assert "the command was ended by Ctrl-C or a signal" in said(err)
    assert json.loads(file.read_text())["trainings"][0]["steps"] == 3
    assert not tagged()


NEEDS_TERM = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: pathlib.Path(sys.argv[1], "interrupted").touch())
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("gave back what it held") or 0))
pathlib.Path(sys.argv[1], "ready").touch()
while True:
    time.sleep(0.05)
"""


def test_a_command_that_lets_ctrl_c_pass_is_terminated_before_it_is_killed(folder, tmp_path):
    (folder / "launcher.py").write_text(NEEDS_TERM)
    command = [sys.executable, "launcher.py", str(tmp_path)]
    words = [sys.executable, "-m", "plumbline.cli.main", "check", "--", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for name in ("ready", "interrupted"):
            while not (tmp_path / name).exists():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        assert process.communicate()[0] == "gave back what it held\n"
    assert process.returncode == 130
    assert not tagged()


BEFORE = "model = torch.nn"


@pytest.mark.parametrize(
    ("does", "sentence"),
    [
        (
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))",
            "NOT JUDGED: recording failed: evidence cannot be written (File too large): free some space, or set "
            "TMPDIR to another folder",
        ),
        (
            "import os, shutil; shutil.rmtree(os.environ['PLUMBLINE_CHECK'])",
            "NOT JUDGED: the command removed the folder for evidence while it ran What to do: set `TMPDIR` to a folder",
        ),
    ],
    ids=["full", "removed"],
)
def test_evidence_that_cannot_be_kept_leaves_the_script_alone(check, does, sentence):
    text = LOOP.format(steps=5, after="print('trained')").replace(BEFORE, f"{does}\n{BEFORE}", 1)
    code, out, err, written = check(text)
    assert sentence in said(err)
    assert (code, out, written["script"]["exit_code"]) == (2, "trained\n", 0)


def test_a_folder_for_evidence_that_cannot_be_made_is_said_with_the_way_out(folder, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    assert main(["check", "--", sys.executable, "-c", "print(1)"]) == 2
    assert "set TMPDIR to a writable folder" in capsys.readouterr().err


def test_a_check_that_is_terminated_while_it_judges_leaves_no_folder(folder, tmp_path, monkeypatch):
    (folder / "train.py").write_text(LOOP.format(steps=2, after=""))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    judging = "plumbline.check.judge.script_checks.judged_trainings"
    monkeypatch.setattr(judging, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["check", "--", sys.executable, "train.py"]) == 130
    assert not [*tmp_path.glob("plumbline-check-*")]
