"""A round starts on a given core, but is not bound to it."""

from __future__ import annotations

import os

import pytest

from plumbline.worker.timing.devices import begin_on_core

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no thread to a core")


@pytest.fixture
def moves(monkeypatch):
    """The requests to the kernel, which are still carried out."""
    asked, move = [], os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: (asked.append(sorted(cores)), move(pid, cores)))
    return asked


def test_the_cores_have_their_turns_and_none_is_kept(moves):
    cores = sorted(os.sched_getaffinity(0))
    for number in range(2 * len(cores)):
        begin_on_core(number)
        assert os.sched_getaffinity(0) == set(cores)
    assert moves == [one for core in 2 * cores for one in ([core], cores)]


def test_only_cores_that_the_thread_may_use_have_turns(moves):
    cores = os.sched_getaffinity(0)
    last = max(cores)
    try:
        os.sched_setaffinity(0, {last})
        begin_on_core(5)
        assert os.sched_getaffinity(0) == {last}
    finally:
        os.sched_setaffinity(0, cores)
    assert moves == [[last], [last], [last], sorted(cores)]


def test_where_it_is_not_allowed_nothing_happens(monkeypatch):
    def refuse(pid, cores):
        raise PermissionError("the sandbox says no")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    begin_on_core(1)
