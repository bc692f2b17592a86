"""A start is waited for as long as it makes progress, and the user sees why."""

from __future__ import annotations

import errno
import socket

import pytest

from plumbline.launch import start_wait
from plumbline.launch.start_wait import NOTIFY_INTERVAL_S, START_TIMEOUT_S, StartWait
from plumbline.worker import node_server


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(start_wait, "time", clock)
    monkeypatch.setattr(node_server, "time", clock)
    return clock


def ends_after(clock, wait, step=10.0):
    """Return when a wait gives up if nothing else happens."""
    while wait.goes_on("a node"):
        clock.now += step
    return clock.now


def test_a_server_that_does_nothing_is_given_up(clock):
    assert ends_after(clock, StartWait(lambda: 1.0)) == pytest.approx(START_TIMEOUT_S, abs=10.1)


def test_a_server_that_gets_a_tenth_of_a_processor_is_waited_for_until_it_has_had_its_time(clock):
    wait = StartWait(lambda: clock.now / 10)
    assert ends_after(clock, wait) == pytest.approx(11 * START_TIMEOUT_S, abs=20.1)


def test_each_event_that_is_reported_is_progress(clock):
    wait = StartWait(lambda: 0.0)
    for _ in range(5):
        clock.now += START_TIMEOUT_S - 1
        assert wait.goes_on("a node")
        wait.report_progress()
    clock.now += START_TIMEOUT_S + 1
    assert not wait.goes_on("a node")


def test_the_user_is_shown_what_is_waited_for(clock):
    shown = []
    wait = StartWait(lambda: 0.0, shown.append)
    for _ in range(7):
        wait.goes_on("host-1 to import torch")
        clock.now += NOTIFY_INTERVAL_S / 2 + 0.1
    assert shown == [f"waiting for host-1 to import torch ({seconds} s so far)" for seconds in (30, 60, 91)]


def test_a_launcher_that_cannot_be_reached_at_first_is_tried_again(clock, monkeypatch):
    """As in a network that has just come up."""
    errors = [ConnectionRefusedError(errno.ECONNREFUSED, ""), OSError(errno.EHOSTUNREACH, ""), TimeoutError()]
    connection = socket.socket()

    def connect(place, timeout):
        if errors:
            raise errors.pop(0)
        return connection

    monkeypatch.setattr(socket, "create_connection", connect)
    assert node_server._connect([("10.0.0.1", 1)], lambda *both: both) == (connection, "10.0.0.1")


def test_a_launcher_that_is_never_reached_is_given_up_with_the_reason(clock, monkeypatch):
    def connect(place, timeout):
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(OSError, match="No route to host"):
        node_server._connect([("10.0.0.1", 1), ("10.0.0.2", 1)], lambda *both: both)
    assert clock.now >= node_server.CONNECT_TIMEOUT_S
