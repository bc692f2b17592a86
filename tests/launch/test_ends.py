"""However a rank ends, the cell has a result that names it, and the next cell trains normally."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from plumbline.core.outcome import Outcome
from plumbline.launch.cell_launch import Settings
from plumbline.worker.rank_log import KEPT

LONG = 600.0
"""The time limit of ``launched``, in seconds."""


@pytest.fixture(autouse=True)
def _the_pool_goes_on(launched):
    """After each test, train a right cell on the same pool."""
    yield
    _, findings, _ = launched("trains")
    assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}


@pytest.mark.parametrize("topology", ["1x1", "1x2", "1x3"])
def test_a_rank_that_raises_is_named_with_its_message(launched, topology):
    _, findings, _ = launched("raises", topology)
    assert findings.keys() == {"launch"}
    assert findings["launch"].outcome is Outcome.ERRORED
    assert findings["launch"].rank == int(topology[-1]) - 1
    assert "RuntimeError: the third batch is broken" in findings["launch"].message


def test_a_rank_that_raises_leaves_its_traceback(launched):
    _, findings, folder = launched("raises")
    assert "in broken_batch" in (folder / "rank-1.log").read_text()
    line = 'in broken_batch: raise RuntimeError("the third batch is broken")'
    assert line in findings["launch"].message, "the message leads to the user's line"
    assert "in fit: in_the_middle()" in findings["launch"].message


def test_leaving_with_sys_exit_is_no_success(launched):
    _, findings, _ = launched("asks-to-exit")
    assert findings["launch"].outcome is Outcome.ERRORED
    assert findings["launch"].rank == 1
    assert "SystemExit" in findings["launch"].message


@pytest.mark.parametrize(("subject", "said"), [("exits", "exit code 0"), ("is-killed", "signal 9")])
@pytest.mark.parametrize("topology", ["1x1", "1x2"])
def test_a_rank_that_dies_is_named(launched, subject, said, topology):
    _, findings, _ = launched(subject, topology)
    assert findings["launch"].outcome is Outcome.CRASHED
    assert findings["launch"].rank == int(topology[-1]) - 1
    assert said in findings["launch"].message


def test_a_rank_that_never_joins_does_not_keep_the_others_until_the_time_limit(launched):
    _, findings, _ = launched("exits-before-the-group")
    assert findings["launch"].outcome is Outcome.CRASHED
    assert findings["launch"].rank == 1


@pytest.mark.parametrize("topology", ["1x1", "1x2"])
def test_a_rank_that_hangs_is_ended_and_its_stack_shown(launched, topology):
    trace, findings, folder = launched("hangs", topology, hanging=1)
    assert findings["launch"].outcome is Outcome.TIMED_OUT
    assert f"after {LONG:.0f} s" in findings["launch"].message
    last = int(topology[-1]) - 1
    assert "in for_ever" in (folder / f"rank-{last}.stack").read_text()
    assert "in for_ever" in trace.exits[last].stack
    assert findings["launch"].rank == last, "those that wait for it are not named in its place"
    assert "in for_ever" in findings["launch"].message


def test_a_rank_that_hangs_after_its_evidence_is_judged_all_the_same(launched):
    _, findings, _ = launched("hangs-on-its-way-out")
    assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}


def test_what_a_rank_prints_blocks_nobody_and_fills_no_disk(launched):
    _, findings, folder = launched("floods")
    assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}
    log = (folder / "rank-1.log").read_text()
    assert log.startswith("x"), "the beginning is kept"
    assert log.endswith("y\n"), "and the end"
    assert "bytes left out" in log
    assert len(log) < 4 * KEPT


def test_a_child_that_a_rank_leaves_behind_is_ended(launched, is_gone):
    _, findings, folder = launched("leaves-a-child")
    children = [int(line.split()[1]) for line in (folder / "rank-1.log").read_text().splitlines() if "child" in line]
    assert children
    assert all(is_gone(child) for child in children)
    assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}


def test_nothing_is_left_in_shared_memory(launched):
    before = set(os.listdir("/dev/shm"))
    _, findings, _ = launched("loads-with-workers")
    assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}
    left = set(os.listdir("/dev/shm")) - before
    alive = {name for name in os.listdir("/proc") if name.isdigit()}
    assert not {name for name in left if not alive & set(name.replace("-", "_").split("_"))}


def test_evidence_lies_in_the_folder_a_file_a_rank(launched):
    _, _, folder = launched("trains", "1x3")
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [f"rank-{r}.safetensors" for r in range(3)]
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("ddp", ["0 0 4 2 0 127.0.0.1", "1 1 4 2 0 127.0.0.1", "2 0 4 2 1 127.0.0.1", "3 1 4 2 1 127.0.0.1"]),
        ("ddp2", ["0 0 2 1 0 127.0.0.1", "1 0 2 1 1 127.0.0.1"]),
    ],
)
def test_ranks_see_what_torchrun_would_set(launched, backend, expected):
    _, _, folder = launched("prints-its-environment", "2x2", backend=backend)
    assert [path.read_text().splitlines()[0] for path in sorted(folder.glob("*.log"))] == expected


def test_two_pools_launch_at_once(launched, ends, warm_pool):
    both = {}

    def go(name, subject, pool):
        both[name] = launched(subject, "1x2", pool=pool)[1]

    threads = [
        threading.Thread(target=go, args=("one", "trains", ends)),
        threading.Thread(target=go, args=("other", "torch", warm_pool("torch"))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert both.keys() == {"one", "other"}
    assert all(finding.outcome is Outcome.PASSED for findings in both.values() for finding in findings.values())


def test_thirty_two_ranks_on_four_nodes(launched, warm_pool):
    trace, findings, _ = launched("torch", "4x8", pool=warm_pool("torch"))
    assert len(trace.ranks) == 32
    assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}


def test_the_launch_folder_may_be_a_name_with_spaces(ends, cell_of, tmp_path):
    from plumbline.launch.cell_launch import launch

    cell = cell_of("mlp", "none", "1x1", subject="trains")
    assert launch(ends, cell, Path(tmp_path / "a b" / "ü"), Settings(LONG)).ranks
