"""Which of a node's processes is named if several ended badly."""

from __future__ import annotations

import signal

import pytest

from plumbline.launch.launch_progress import ChildEnd, first_to_fail


def ended(rank: int, at: float, code: int | None, *, raised: bool = False, late: bool = False) -> ChildEnd:
    return ChildEnd(
        pid=100 + rank,
        rank=rank,
        steps=1,
        evidence=rank if raised else None,
        failed=raised,
        idle=False,
        late=late,
        out_of_memory=False,
        unwritten=None,
        at=at,
        orphaned=False,
        code=code,
    )


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, 0, 3])
def test_a_rank_that_died_is_named_before_those_that_lost_their_connection_to_it(code):
    assert first_to_fail([ended(0, 1.0, 1, raised=True), ended(1, 1.1, code)]).rank == 1


@pytest.mark.parametrize("seen", [0.9, 1.1])
@pytest.mark.parametrize("code", [-signal.SIGTERM, -signal.SIGABRT, None])
def test_a_rank_that_was_ended_after_an_error_is_not_named_whichever_end_is_seen_first(code, seen):
    assert first_to_fail([ended(0, 1.0, 1, raised=True), ended(1, seen, code)]).rank == 0


def test_of_ranks_that_raised_the_first_is_named_and_of_none_that_the_launch_ended():
    ends = [ended(0, 2.0, 1, raised=True), ended(1, 1.0, 1, raised=True), ended(2, 0.5, -signal.SIGKILL, late=True)]
    assert first_to_fail(ends).rank == 1
    assert first_to_fail(ends[2:]) is None


def test_a_rank_that_ended_unseen_is_named_before_one_that_only_lost_its_connection_to_it():
    """torchrun reaps the processes that it starts, so their exit status is unknown."""
    ends = [ended(0, 1.1, 1, raised=True), ended(1, 1.0, None)]
    assert first_to_fail(ends).rank == 0
    assert first_to_fail(ends, cut_off={0}).rank == 1
