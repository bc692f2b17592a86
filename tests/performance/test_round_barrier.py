"""Either all ranks pass a boundary together, or none."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from plumbline.benchmark.timed_launch import MissingRanksError, RoundControl
from plumbline.core.errors import LaunchError
from plumbline.worker.timing.round_barrier import GO, REPORT, RoundBarrier

HANGS_AFTER = 600
"""Seconds after which a thread hangs, however busy the machine is."""


@pytest.fixture
def gates(tmp_path_factory):
    path = tmp_path_factory.mktemp("g") / "gate"
    opened = RoundControl(path, 3)
    opened.path = str(path)
    yield opened
    opened.close()


@contextmanager
def ranks(gates, do, count=3):
    """Run ``do(gate, rank)`` for each rank in its own thread."""
    threads = [threading.Thread(target=do, args=(RoundBarrier(gates.path, rank), rank)) for rank in range(count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(HANGS_AFTER)
        assert not thread.is_alive()


def test_ranks_are_let_go_when_all_are_there_and_told_to_report(gates):
    told = []

    def train(gate, rank):
        for _ in range(3):
            told.append(gate.wait())
        gate.report({"rank": rank})

    with ranks(gates, train):
        for _ in range(2):
            gates.wait(HANGS_AFTER)
            gates.release()
        gates.wait(HANGS_AFTER)
        assert told == [GO] * 6
        assert gates.reports(HANGS_AFTER) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert sorted(told) == sorted([GO] * 6 + [REPORT] * 3)


def test_a_rank_that_leaves_is_missed_by_its_number(gates):
    def train(gate, rank):
        if rank == 1:
            gate._socket.close()
            return
        with pytest.raises(ConnectionError):  # at its read, or already at its write
            gate.wait()

    with ranks(gates, train):
        with pytest.raises(MissingRanksError) as missing:
            gates.wait(HANGS_AFTER)
        assert (missing.value.ranks, missing.value.late) == ({1}, False)
        gates.close()


def test_a_rank_that_never_comes_is_late(gates):
    there = threading.Barrier(3)

    def train(gate, rank):
        gate._socket.sendall(b"\n")
        there.wait()
        assert gate._socket.recv(1) == b""

    with ranks(gates, train, count=2):
        there.wait()
        with pytest.raises(MissingRanksError) as missing:
            gates.wait(1)
        assert (missing.value.ranks, missing.value.late) == ({2}, True)
        gates.close()


def test_a_rank_that_has_reported_may_go_before_the_others(gates):
    first = threading.Event()

    def train(gate, rank):
        gate.wait()
        if rank:
            assert first.wait(HANGS_AFTER)
        gate.report({"rank": rank})
        first.set()

    with ranks(gates, train):
        gates.wait(HANGS_AFTER)
        assert len(gates.reports(HANGS_AFTER)) == 3


def test_a_path_that_no_socket_can_have_is_said_with_a_way_out():
    with pytest.raises(LaunchError, match="TMPDIR"):
        RoundControl(Path("/") / ("x" * 200), 1)
