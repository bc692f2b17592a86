"""Sessions with marked tests: xdist, -x, -s, the debugger, Ctrl-C; and sessions without any."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FAILS = """
import pytest
import torch.distributed as dist


@pytest.mark.ranks(2, timeout=5)
def test_of_two(rank):
    secret = 4711 + rank
    print(f"printed by {rank}")
    assert secret == 0


@pytest.mark.ranks(3)
def test_of_three(rank):
    dist.barrier()
"""

STOPS = """
import pytest
import torch.distributed as dist


@pytest.mark.ranks(2, timeout=5)
def test_it(rank):
    secret = 4711
    if rank == 0:
        breakpoint()
    dist.barrier()
"""

WAITS = """
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.mark.ranks(2)
def test_it(rank):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    dist.barrier()
    Path(f"pids-{rank}").write_text(f"{os.getpid()} {child.pid} ")
    dist.barrier()
    print("ready", file=sys.__stdout__, flush=True)
    time.sleep(1000)
"""


def test_under_xdist_it_is_as_without(users):
    run = users(FAILS, "-n", "1")
    assert run["test_of_three"].outcome == "passed"
    assert run["test_of_two"].message.startswith("ranks 0, 1 of 2: assert 4711 == 0")
    assert "Captured stdout of rank 1 call" in run.stdout


def test_the_first_failure_ends_a_session_on_request(users):
    run = users(FAILS, "-x", "-s")
    assert list(run.results) == ["test_of_two"]
    assert run.stdout.count("printed by 1") == 1
    assert "Captured" not in run.stdout


@pytest.mark.parametrize(
    ("source", "options"), [(FAILS, ["--pdb", "-k", "two"]), (STOPS, [])], ids=["pdb", "breakpoint"]
)
def test_rank_0_can_be_debugged(source, options, tmp_path, command):
    (tmp_path / "test_own.py").write_text(source)
    shown = talk(tmp_path, command(*options, "test_own.py"), ["p secret", "p 'rank', rank", "c"])
    assert "(Pdb) p secret\n4711\n" in shown
    assert "('rank', 0)" in shown
    assert shown.count("(Pdb)") == 3
    assert ("1 failed" if options else "1 passed") in shown


def test_leaving_the_debugger_ends_the_session_with_its_report(tmp_path, command):
    (tmp_path / "test_own.py").write_text(FAILS)
    shown = talk(tmp_path, command("--pdb", "test_own.py"), ["q"])
    assert "ranks 0, 1 of 2 failed" in shown
    assert "Quitting debugger" in shown
    assert "1 failed" in shown
    assert "passed" not in shown.splitlines()[-1]


def talk(folder: Path, arguments: list[str], answers: list[str]) -> str:
    """Run a program in a terminal, and answer each debugger prompt; return its output."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _IN_TERMINAL, *arguments], cwd=folder, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown, prompts = b"", 0
    try:
        while select.select([controller], [], [], 120)[0]:
            try:
                chunk = os.read(controller, 1 << 16)
            except OSError:  # all processes have closed the terminal
                break
            shown += chunk
            if shown.count(b"(Pdb) ") > prompts and prompts < len(answers):
                os.write(controller, answers[prompts].encode() + b"\n")
                prompts += 1
        else:
            pytest.fail(f"it waits for ever after {shown.decode()}")
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    return shown.decode().replace("\r\n", "\n")


_IN_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
def test_when_the_session_is_ended_so_are_its_ranks_and_what_they_started(number, tmp_path, command):
    (tmp_path / "test_own.py").write_text(WAITS)
    session = subprocess.Popen(
        command("-s", "test_own.py"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert session.stdout is not None
    ready = 0
    for line in session.stdout:
        ready += line.count("ready")
        if ready == 2:
            break
    pids = [int(pid) for rank in (0, 1) for pid in (tmp_path / f"pids-{rank}").read_text().split()]
    assert all(map(alive, pids))
    session.send_signal(number)
    rest = session.stdout.read()  # until the last process that holds the pipe has ended
    session.wait()
    assert len(pids) == 4
    assert not [pid for pid in pids if alive(pid)], rest


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_other_sessions_import_nothing_heavy_and_have_no_option_of_ours(users, command):
    run = users(
        """
import sys

def test_it(pytestconfig):
    heavy = {"torch", "numpy", "pandas", "plumbline.ranks", "plumbline.launch"}
    assert not heavy & set(sys.modules)
    assert "plumbline.pytest_ranks.plugin" in sys.modules

def test_own_names(rank):
    assert rank == "mine"

import pytest

@pytest.fixture
def rank():
    return "mine"
"""
    )
    assert run.code == 0, run.stdout
    shown = subprocess.run(command("--help"), capture_output=True, text=True, check=True, cwd="/").stdout
    assert "plumbline" not in shown.lower().replace("(plumbline)", "")


def test_the_suites_plugin_and_this_one_do_not_meet(tmp_path, command):
    suites = Path(__file__).parents[2] / "suites"
    listed = subprocess.run(
        command(str(suites), "--gpus", "1", "--collect-only", "-q", "-m", "smoke"),
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert listed.returncode == 0, listed.stdout + listed.stderr


def test_marked_tests_come_first_where_there_are_devices(users, tmp_path):
    """The marker forks pytest's process, which other tests may have given a CUDA context."""
    (tmp_path / "conftest.py").write_text(
        "import os\nimport plumbline.pytest_ranks.plugin as plugin\nplugin._DEVICES = (os.devnull,)\n"
    )
    run = users(
        "import pytest\n\ndef test_one():\n    pass\n\n"
        "@pytest.mark.ranks(2)\ndef test_two():\n    pass\n\ndef test_three():\n    pass\n",
        "--collect-only",
        "-q",
    )
    assert [line.partition("::")[2] for line in run.stdout.splitlines()[:3]] == ["test_two", "test_one", "test_three"]


IN_A_GROUP = """
import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_it():
    pass
"""


def test_a_process_that_is_in_a_group_is_told_to_leave_it(users):
    result = users(IN_A_GROUP)["test_it"]
    assert result.outcome == "failure"
    assert "this process is in a process group already" in result.text
