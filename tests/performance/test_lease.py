"""A measured cell has the machine for itself, across processes too."""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile

import pytest

from plumbline.launch.this_machine import devices_of
from plumbline.machine.lease import exclusive_lease, shared_lease, try_shared_lease

HANGS_AFTER = 600.0
"""Seconds without a line after which a process hangs, however busy the machine is."""


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch):
    """Locks that nothing else on this machine holds."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Other:
    """A process that takes a lease, and releases it on request."""

    def __init__(self, take):
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLD, take, tempfile.gettempdir()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # otherwise, select would not see a line that was read ahead
        )

    def says(self, seconds=HANGS_AFTER):
        """Return its next line, or "" after a timeout."""
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return self._process.stdout.readline().decode().strip() if ready else ""

    @property
    def pid(self):
        return self._process.pid

    def give_back(self):
        self._process.stdin.write(b"\n")

    def die(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


HOLD = """
import sys, tempfile
from plumbline.machine.lease import exclusive_lease, shared_lease
tempfile.tempdir = sys.argv[2]
notify = lambda text: print(text, flush=True)
notify("here")
with eval(sys.argv[1]):
    notify("mine")
    input()
notify("given back")
"""


@pytest.fixture
def elsewhere():
    """Start a process that takes a lease; it has started to do so when this returns."""
    others = []

    def start(take):
        others.append(Other(take))
        assert others[-1].says() == "here"
        return others[-1]

    yield start
    for other in others:
        other.die()


def test_cells_that_are_examined_share_the_machine(elsewhere):
    assert elsewhere("shared_lease()").says() == "mine"
    with shared_lease():
        lease = try_shared_lease()
        assert lease is not None
        lease.give_back()


def test_nobody_shares_with_a_cell_that_is_measured(elsewhere):
    other = elsewhere("exclusive_lease()")
    assert other.says() == "mine"
    assert try_shared_lease() is None
    other.give_back()
    with shared_lease():
        assert other.says() == "given back"


def test_who_measures_waits_until_all_others_are_gone(elsewhere):
    with shared_lease():
        other = elsewhere("exclusive_lease()")
        assert other.says(0.5) == ""
        # It is next in line: a process that came now would make it wait longer.
        assert try_shared_lease() is None
    assert other.says() == "mine"


def test_two_that_measure_come_one_after_the_other(elsewhere):
    first = elsewhere("exclusive_lease()")
    assert first.says() == "mine"
    second = elsewhere("exclusive_lease()")
    assert second.says(0.5) == ""
    first.give_back()
    assert second.says() == "mine"


def test_what_a_dead_process_held_is_free(elsewhere):
    other = elsewhere("exclusive_lease()")
    assert other.says() == "mine"
    other.die()
    with shared_lease():
        pass


def test_giving_back_twice_is_giving_back_once():
    lease = exclusive_lease()
    lease.give_back()
    lease.give_back()
    with exclusive_lease():
        pass


def test_a_device_is_somebodys_alone_and_who_waits_for_it_says_for_whom(elsewhere):
    first = elsewhere("shared_lease(['GPU 2', 'GPU 0'])")
    assert first.says() == "mine"
    with try_shared_lease(["GPU 1"]):
        assert try_shared_lease(["GPU 1", "GPU 2"]) is None
    second = elsewhere("shared_lease(['GPU 1', 'GPU 2'], notify=notify)")
    assert second.says() == f"waiting for GPU 2, held by process {first.pid}"
    first.give_back()
    assert second.says() == "mine"


def test_devices_are_shared_where_several_ranks_share_one_anyway(elsewhere):
    assert elsewhere("shared_lease(['GPU 0'], share_devices=True)").says() == "mine"
    assert try_shared_lease(["GPU 0"]) is None
    with try_shared_lease(["GPU 0"], share_devices=True):
        pass


def test_devices_are_free_before_the_machine_is(elsewhere):
    with shared_lease(["GPU 0"]) as lease:
        other = elsewhere("shared_lease(['GPU 0'])")
        assert other.says(0.5) == ""
        lease.give_back_devices()
        assert other.says() == "mine"
        assert elsewhere("exclusive_lease()").says(0.5) == ""


def test_those_who_want_several_devices_in_any_order_all_get_them(elsewhere):
    orders = "(['GPU 0', 'GPU 1'], ['GPU 1', 'GPU 0'])"
    program = f"[shared_lease(wanted).give_back() for wanted in {orders} * 50] and shared_lease()"
    for other in [elsewhere(program) for _ in range(3)]:
        assert other.says() == "mine"


def test_a_device_of_a_dead_process_is_free(elsewhere):
    other = elsewhere("shared_lease(['GPU 0'])")
    assert other.says() == "mine"
    other.die()
    with shared_lease(["GPU 0"]):
        pass


def test_simulated_devices_are_nobodys(cell_of):
    assert devices_of(cell_of("mlp", "ddp", "1x2"), oversubscribe=False) == ()
