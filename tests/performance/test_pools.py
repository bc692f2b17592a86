"""Each launch of a cell is forked from its own interpreter, for all cells of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import psutil
import pytest

from plumbline.core.errors import LaunchError, SubjectError
from plumbline.engine.subject_pools import SERVER, SPARE, WarmPools
from plumbline.launch.pool import Pool

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
    (three,) = pools.several(TRAINERS, count=3)
    assert len(set(three)) == 3
    assert len(children() - before) == 3
    assert pools.several(TRAINERS, count=2) == [three[:2]]
    assert len(children() - before) == 3
    pools.close()
    assert children() == before


def test_they_are_at_rest_when_something_is_to_be_measured(pools):
    (several,) = pools.several(TRAINERS, count=3)
    used = [sum(psutil.Process(pool.server).cpu_times()[:2]) for pool in several]
    for pool in several:
        pool.wait_until_idle()  # it answers when its earlier work is done
    more = [sum(psutil.Process(pool.server).cpu_times()[:2]) for pool in several]
    assert max((after - before) / before for before, after in zip(used, more, strict=True)) < 0.03, "of its start"


def test_one_that_died_is_replaced(pools):
    before = children()
    ((first, second),) = pools.several(TRAINERS, count=2)
    victim = min(children() - before, key=lambda process: process.create_time())
    victim.kill()
    victim.wait()
    (again,) = pools.several(TRAINERS, count=2)
    assert all(pool.alive for pool in again)
    assert len({first, second} & set(again)) == 1


def test_what_cannot_be_imported_is_said(pools):
    with pytest.raises(SubjectError, match="nowhere"):
        pools.several("nowhere.py", count=2)


class Interpreter:
    """Stands in for a pool that takes the estimated memory."""

    def __init__(self, machine, locator):
        self.alive, self.locator, self.machine = True, locator, machine
        machine.append(self)

    def wait_until_idle(self):
        assert self.alive

    def close(self):
        self.alive = False
        self.machine.remove(self)


@pytest.fixture
def small():
    """A machine with memory for six interpreters, and its interpreters."""
    machine = []
    return WarmPools(partial(Interpreter, machine), lambda: (6 - len(machine)) * SERVER + SPARE), machine


def living(machine):
    return "".join(sorted(one.locator for one in machine))


def test_those_used_longest_ago_make_room(small):
    pools, machine = small
    pools.several("a", "y", count=2)
    pools.several("b", "y", count=2)
    assert living(machine) == "aabbyy"
    pools.several("c", "y", count=2)
    assert living(machine) == "bbccyy"
    (b, y) = pools.several("b", "y", count=2)
    pools.several("d", "y", count=2)
    assert living(machine) == "bbddyy"
    assert all(pool.alive for pool in (*b, *y))


def test_where_there_is_no_room_it_is_said_before_anything_is_started(small):
    pools, machine = small
    pools.several("a", count=1)
    with pytest.raises(
        LaunchError, match=r"not enough memory for 8 more .* 3.4 GiB are free, 4.2 GiB are needed. Use fewer --l"
    ):
        pools.several("b", "y", count=4)
    assert living(machine) == ""
    pools.several("b", "y", count=3)
    assert living(machine) == "bbbyyy"


def test_a_machine_that_does_not_say_how_much_is_left_has_room():
    machine = []
    WarmPools(partial(Interpreter, machine), lambda: None).several("a", count=50)
    assert len(machine) == 50
