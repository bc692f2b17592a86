"""A pool that is closed, or whose owner dies, leaves no process behind; one that cannot start says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plumbline.core.errors import PlanError, SubjectError
from plumbline.launch.cell_launch import Settings
from plumbline.launch.pool import Pool
from plumbline.subjects.load import load, parse_subject


def descendants(pid: int) -> set[int]:
    """Return the processes below ``pid``."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | (descendants(child) if Path(f"/proc/{child}").exists() else set())
    return found


def test_closing_a_pool_leaves_no_process(tmp_path, cell_of):
    from plumbline.launch.cell_launch import launch

    before = descendants(os.getpid())
    pool = Pool(str(Path(__file__).parent / "subjects" / "ends.py"))
    try:
        launch(pool, cell_of("mlp", "ddp", "1x2", subject="trains"), tmp_path, Settings(600))
    finally:
        pool.close()
    assert descendants(os.getpid()) <= before
    pool.close()  # closing twice is harmless


def test_a_pool_that_is_closed_before_it_is_warm_leaves_no_process():
    before = descendants(os.getpid())
    Pool("torch").close()
    assert descendants(os.getpid()) <= before


OWNER = """
import sys
from pathlib import Path
from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.launch.cell_launch import launch
from plumbline.launch.pool import Pool
from plumbline.launch.cell_launch import Settings
cell = Cell("says-who-it-is-and-hangs", "mlp", "ddp", Topology(1, 2), "32", "cpu")
launch(Pool(sys.argv[1]), cell, Path(sys.argv[2]), Settings(600))
"""


def ranks_in(folder: Path, owner: subprocess.Popen[bytes]) -> list[int]:
    """Return the process ids that two ranks wrote, as soon as both hang."""
    while True:
        said = [path.read_text().split() for path in folder.glob("rank-*.log")]
        if len(said) == 2 and all(words[2:] == ["hangs"] for words in said):
            return [int(words[1]) for words in said]
        assert owner.poll() is None, "the ranks did not come to life"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_owner_that_is_killed_takes_its_ranks_along(tmp_path, is_gone, number):
    ends = str(Path(__file__).parent / "subjects" / "ends.py")
    owner = subprocess.Popen([sys.executable, "-c", OWNER, ends, str(tmp_path)])
    try:
        ranks = ranks_in(tmp_path, owner)
        below = descendants(owner.pid)
        assert set(ranks) <= below
    finally:
        owner.send_signal(number)
        owner.wait()
    assert all(is_gone(pid) for pid in below)


STARTS_CUDA = {
    "pretends": "import plumbline.devices.calls\nplumbline.devices.calls.driver_started = lambda: True",
    "really": "import torch\ntorch.zeros(1, device='cuda')",
}


@pytest.mark.parametrize("how", ["pretends", pytest.param("really", marks=pytest.mark.cuda)])
def test_a_subject_that_starts_cuda_when_it_is_imported_is_refused(tmp_path, how):
    file = tmp_path / "early.py"
    declared = "from plumbline import subject\n@subject(name='early', backends=['none'])\ndef train(job): pass\n"
    file.write_text(f"{STARTS_CUDA[how]}\n{declared}")
    pool = Pool(str(file))
    try:
        with pytest.raises(SubjectError, match=r"early\.py starts CUDA.*Move the code that uses a device"):
            assert pool.subjects
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("locator", "said"),
    [
        ("nowhere/trainer.py", "file nowhere/trainer.py not found"),
        ("no_such_module_anywhere", "cannot be imported"),
        ("plumbline.core.cell", "declares no subject"),
        ("torch::nobody", "has no subject 'nobody'; it has torch"),
    ],
)
def test_a_locator_that_names_nothing_is_answered_in_a_sentence(locator, said):
    with pytest.raises(SubjectError, match=said):
        load(locator)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def train(job): pass", "declares no subject: decorate"),
        ("import a_library_that_is_not_here", "cannot be imported: ModuleNotFoundError"),
        ("def train(job:", "cannot be imported: SyntaxError"),
        (
            "from plumbline import subject\n@subject(name='x', backends=['dpp'])\ndef train(job): pass",
            "unknown backend 'dpp'",
        ),
        ("from plumbline import subject\n@subject(name='x', backends=[], precisions=['8'])\ndef t(job): pass", "'8'"),
        ("from plumbline import subject\n@subject(name='a/b', backends=['ddp'])\ndef t(job): pass", "'a/b'"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_a_file_that_is_no_subject_is_answered_in_a_sentence(tmp_path, source, said):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(SubjectError, match=said):
        load(str(tmp_path / "mine.py"))


def test_one_of_several_subjects_is_chosen_by_name(tmp_path):
    declared = "@subject(name={0!r}, backends=['ddp'])\ndef {0}(job): pass\n"
    (tmp_path / "two.py").write_text(
        "from plumbline import subject\n" + declared.format("one") + declared.format("two")
    )
    assert [found.name for found in load(str(tmp_path / "two.py"))] == ["one", "two"]
    assert [found.name for found in load(f"{tmp_path / 'two.py'}::two")] == ["two"]


def test_a_file_called_like_a_library_takes_nobodys_place(tmp_path):
    (tmp_path / "json.py").write_text(
        "from plumbline import subject\n@subject(name='mine', backends=['ddp'])\ndef train(job): pass"
    )
    import json

    assert [found.name for found in load(str(tmp_path / "json.py"))] == ["mine"]
    assert sys.modules["json"] is json


@pytest.mark.parametrize("locator", ["nowhere.py", "torch::nobody"])
def test_a_pool_refuses_with_the_locator_and_the_reason(locator):
    with pytest.raises(SubjectError, match=f"--subject {locator}: "):
        _ = Pool(locator).subjects


@pytest.mark.parametrize("program", ["false", "echo"])
def test_an_interpreter_that_is_none_is_a_subject_error(program):
    with pytest.raises(SubjectError, match="--subject torch: "):
        _ = Pool("torch", f"/bin/{program}").subjects


def test_the_interpreter_stands_after_a_semicolon():
    assert parse_subject("mine.py") == ("mine.py", None)
    assert parse_subject(f"mine.py::a;python={sys.executable}") == ("mine.py::a", sys.executable)


@pytest.mark.parametrize(
    "text",
    ["mine.py;python=", "mine.py;python", "mine.py;pyhton=/usr/bin/python3", "mine.py;python=/no/such/python",
     f";python={sys.executable}", ""],
)  # fmt: skip
def test_anything_else_after_the_semicolon_is_refused(text):
    with pytest.raises(PlanError, match="--subject"):
        parse_subject(text)


@pytest.fixture(autouse=True)
def _modules():
    """Remove the modules that ``load`` imported."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in ("mine", "two", "subject_json", "subject_two"):
            del sys.modules[name]
