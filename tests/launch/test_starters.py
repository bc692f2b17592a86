"""Trainers that start their ranks themselves are recorded, judged and cleaned up like the harness's own ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from plumbline.core.outcome import Outcome
from plumbline.engine.examine import examine
from plumbline.evidence.read import read_trace
from plumbline.launch.cell_launch import Settings

SUBJECTS = Path(__file__).parent / "subjects"
LONG = 600.0
"""Seconds that no launch takes."""


@pytest.fixture
def started(launched, warm_pool):
    """Launch a trainer that starts its ranks itself, like ``launched``."""

    def started(subject, *arguments, **settings):
        return launched(subject, *arguments, pool=warm_pool(SUBJECTS / "starters.py"), **settings)

    return started


@pytest.fixture(autouse=True)
def _nothing_is_left(started, tmp_path):
    """After each test, its folder has only the ranks' files, and the same pool trains a right cell."""
    yield
    _, findings, _ = started("forks")
    assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}
    for path in (path for folder in tmp_path.iterdir() for path in folder.iterdir()):
        assert path.name.startswith("rank-")
        assert path.suffix in (".safetensors", ".log", ".stack")


@pytest.mark.parametrize(
    ("subject", "topology"),
    [
        ("forks", "1x3"),
        ("forks", "2x1"),
        ("forks", "2x2"),
        ("spawns", "1x2"),
        ("script", "2x1"),
        ("plain-scripts", "1x2"),
        ("trains-itself", "1x1"),
        ("trains-itself", "1x3"),
        ("waits-for-nobody", "1x2"),
        ("kills-what-has-finished", "1x2"),
        ("forks-and-loads-with-workers", "1x2"),
    ],
)
def test_each_rank_is_recorded_as_the_one_that_it_is(started, subject, topology):
    trace, findings, folder = started(subject, topology)
    assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}, findings
    nodes, gpus = map(int, topology.split("x"))
    assert [rank.rank for rank in trace.ranks] == list(range(nodes * gpus))
    assert [rank.rank for rank in read_trace(folder).ranks] == list(range(nodes * gpus))


@pytest.mark.parametrize("subject", ["spawns-and-sums", "forks-and-sums"])
def test_a_wrong_one_is_found_with_its_cause(started, subject):
    _, findings, _ = started(subject)
    assert findings["gradients"].outcome is Outcome.FAILED
    assert findings["gradients"].cause == "summed-over-ranks"


@pytest.mark.parametrize("method", ["fork", "spawn", "script"])
def test_the_first_rank_to_raise_is_named_with_its_own_traceback(started, method):
    trace, findings, folder = started(f"{method}-raises")
    assert findings.keys() == {"launch"}
    assert findings["launch"].outcome is Outcome.ERRORED
    assert findings["launch"].rank == 1
    assert "RuntimeError: the third batch is broken" in findings["launch"].message
    assert "in broken_batch" in (folder / "rank-1.log").read_text()
    assert "in broken_batch" in trace.ranks[-1].stack


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("fork-is-killed", "rank 1: killed by signal 9"),
        ("spawn-is-killed", "rank 1: killed by signal 9"),
        ("script-is-killed", "SIGKILL"),  # torchrun reports it
        ("fork-exits", "rank 1: ended with exit code 0"),
    ],
)
def test_the_first_rank_to_die_is_named(started, subject, said):
    trace, findings, _ = started(subject)
    assert findings["launch"].outcome is Outcome.CRASHED
    assert findings["launch"].rank == 1
    assert said in findings["launch"].message + trace.exits[1].said


@pytest.mark.parametrize("method", ["fork", "script"])
def test_a_rank_that_hangs_is_ended_and_its_stack_shown(started, method):
    trace, findings, folder = started(f"{method}-hangs", hanging=1)
    assert findings["launch"].outcome is Outcome.TIMED_OUT
    assert trace.exits.keys() == {0, 1}
    assert f"after {LONG:.0f} s" in trace.exits[1].message
    assert "in for_ever" in (folder / "rank-1.stack").read_text()
    assert "for_ever" in trace.exits[1].stack


def test_all_that_was_started_goes(started, is_gone):
    shared = set(os.listdir("/dev/shm"))
    _, findings, folder = started("leaves-everything")
    assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}
    said = [line.split() for line in (folder / "rank-0.log").read_text().splitlines()]
    children = [int(words[1]) for words in said if words[0] == "child"]
    assert len(children) == 3
    assert all(is_gone(child) for child in children)
    (scratch,) = [Path(words[1]) for words in said if words[0] == "files"]
    assert not scratch.exists()
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if "mp-" in name}


@pytest.mark.parametrize("topology", ["1x1", "1x2"])
def test_what_raises_before_there_are_ranks_is_the_first_ones_error(started, topology):
    _, findings, folder = started("raises-first", topology)
    assert findings["launch"].outcome is Outcome.ERRORED
    assert findings["launch"].rank == 0
    assert "ValueError: there is nothing to start" in findings["launch"].message
    assert "in raises_first" in (folder / "rank-0.log").read_text()


def test_what_raises_when_all_ranks_are_done_is_the_first_ones_error(started):
    _, findings, folder = started("raises-last")
    assert findings["launch"].outcome is Outcome.ERRORED
    assert "ValueError: what was trained cannot be read" in findings["launch"].message
    assert read_trace(folder).ranks[0].error == "ValueError: what was trained cannot be read"


def test_what_raises_while_ranks_train_does_not_wait_for_the_time_limit(started):
    _, findings, _ = started("raises-meanwhile")
    assert findings["launch"].outcome is Outcome.ERRORED
    assert "ValueError: nobody is waited for" in findings["launch"].message


@pytest.mark.parametrize(
    ("subject", "outcome", "said"),
    [
        ("raises-early", Outcome.ERRORED, "ValueError: no data"),
        ("cannot-be-pickled", Outcome.ERRORED, "pickle"),
        ("first-dies", Outcome.CRASHED, "rank 0: ended with exit code 3"),
        ("does-nothing", Outcome.CRASHED, "the subject started no process with this rank"),
        ("two-of-a-rank", Outcome.ERRORED, "two processes of this launch were rank 0"),
        ("trains-alone", Outcome.FAILED, "rank 0 trained in a world of 1 instead of 2"),
    ],
)
def test_launches_that_go_wrong_are_told_apart(started, subject, outcome, said):
    _, findings, _ = started(subject)
    assert findings.keys() == {"launch"}
    assert findings["launch"].outcome is outcome
    assert said in findings["launch"].message


def test_nobody_is_told_that_ranks_were_started(started):
    _, _, folder = started("prints-its-environment", "2x2")
    assert [(folder / f"rank-{rank}.log").read_text().split() for rank in (0, 2)] == [
        ["0", "0", "127.0.0.1", "-", "-", "0", "0", "2"],
        ["1", "1", "127.0.0.1", "-", "-", "2", "1", "2"],
    ]


@pytest.mark.parametrize(
    ("subject", "workload", "backend", "topology", "precision"),
    [
        ("forking", "mlp", "none", "1x1", "16"),
        ("forking", "mlp", "ddp2", "2x2", "32"),
        ("forking", "cnn-batchnorm", "ddp", "1x3", "32"),
        ("forking", "metrics", "ddp", "1x3", "32"),
        ("forking", "checkpoint", "ddp", "1x3", "32"),
        ("forking", "checkpoint-elastic", "ddp", "1x3", "32"),
        ("forking", "several-optimizers", "ddp", "1x3", "32"),
        ("spawning", "random-masks", "ddp", "1x2", "32"),
        ("spawning", "checkpoint", "ddp", "1x2", "16"),
    ],
)
def test_the_reference_trainers_own_ranks_are_judged_like_the_harness_own(
    warm_pool, cell_of, tmp_path, subject, workload, backend, topology, precision
):
    def findings(subject, pool):
        cell = cell_of(workload, backend, topology, precision, subject=subject)
        found = examine(warm_pool(pool), cell, tmp_path / "reference", Settings(LONG)).findings
        shutil.rmtree(tmp_path / "reference")
        return [(finding.check, finding.outcome, finding.cause) for finding in found]

    assert findings(subject, SUBJECTS / "reference_starting.py") == findings("reference", "reference")
