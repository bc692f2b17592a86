"""Each launch of a cell is forked from an interpreter of its own, for all the cells of a run."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from harness.core.errors import SubjectError
from harness.launch.pool import Pool
from harness.measure.pools import WarmPools

TRAINERS = str(Path(__file__).parent / "subjects" / "timed.py")


@pytest.fixture
def pools():
    opened = WarmPools(Pool)
    yield opened
    opened.close()


def children():
    return set(psutil.Process().children())


def test_there_are_as_many_interpreters_as_launches_and_they_are_kept(pools):
    before = children()
    three = pools.several(TRAINERS, 3)
    assert len(set(three)) == 3
    assert len(children() - before) == 3
    assert pools.several(TRAINERS, 2) == three[:2]
    assert len(children() - before) == 3
    pools.close()
    assert children() == before


def test_they_are_at_rest_when_something_is_to_be_measured(pools):
    several = pools.several(TRAINERS, 3)
    used = [sum(psutil.Process(pool.server).cpu_times()[:2]) for pool in several]
    for pool in several:
        pool.settle()  # it answers when it has done whatever it was at
    more = [sum(psutil.Process(pool.server).cpu_times()[:2]) for pool in several]
    assert max(after - before for before, after in zip(used, more, strict=True)) < 0.1


def test_one_that_died_is_replaced(pools):
    before = children()
    first, second = pools.several(TRAINERS, 2)
    victim = min(children() - before, key=lambda process: process.create_time())
    victim.kill()
    victim.wait(10)
    again = pools.several(TRAINERS, 2)
    assert all(pool.alive for pool in again)
    assert len({first, second} & set(again)) == 1


def test_what_cannot_be_imported_is_said(pools):
    with pytest.raises(SubjectError, match="nowhere"):
        pools.several("nowhere.py", 2)
