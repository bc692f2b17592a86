"""A node finds out which others it can reach, all at once and within a time limit."""

from __future__ import annotations

import socket

import pytest

from plumbline.trainer.environments import free_port
from plumbline.worker.server import ConnectivityProbe, reach

ELSEWHERE = "192.0.2.1"
"""An unassigned address (RFC 5737)."""


@pytest.fixture
def ways():
    made = [ConnectivityProbe() for _ in range(3)]
    yield made
    for one in made:
        one.close()


def test_those_that_listen_are_reached_and_others_named(ways):
    ports = [one.answer({"command": "listen", "address": "127.0.0.1"})["port"] for one in ways]
    ways[1].close()
    peers = {str(number): ("127.0.0.1", port) for number, port in enumerate(ports)}
    answer = ways[0].answer({"command": "reach", "peers": peers, "seconds": 60.0})
    assert answer == {"event": "reached", "failed": {"1": "Connection refused"}}
    again = ways[0].answer({"command": "listen", "address": "127.0.0.1"})["port"]
    assert reach({"0": ("127.0.0.1", ports[0])}, 60.0) == {"0": "Connection refused"}, "it listens at one port only"
    assert reach({"0": ("127.0.0.1", again)}, 60.0) == {}


def test_those_that_keep_silent_are_named_at_the_limit():
    """A full connection queue does not answer, like a firewall that drops packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        place = full.getsockname()
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(place)
        failed = reach({"full": place}, 0.3)
        for one in waiting:
            one.close()
    assert failed == {"full": "no answer in 0.3 s"}


def test_nobody_is_reached_at_an_address_that_this_node_does_not_have(ways):
    with pytest.raises(OSError, match="assign requested address"):
        ways[0].answer({"command": "listen", "address": ELSEWHERE})


def test_a_free_port_can_be_listened_on_and_is_none_that_the_system_gives_away():
    port = free_port()
    assert 10_000 <= port < 32_768
    socket.create_server(("", port)).close()
