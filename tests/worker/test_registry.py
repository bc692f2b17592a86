"""Messages of processes are received in order, with their ends; strangers are ignored."""

from __future__ import annotations

import json
import os
import socket
import sys

import pytest

from plumbline.worker.child_registry import Registry, connect


@pytest.fixture
def heard():
    return []


@pytest.fixture
def registry(heard):
    registry = Registry(lambda child, ended: heard.append((child.pid, child.rank, child.evidence, ended)))
    yield registry
    registry.close()


def line_to(registry, **values):
    line = connect(registry.address)
    line.sendall(json.dumps(values).encode() + b"\n")
    return line


def test_a_child_leaves_evidence_and_ends(registry, heard):
    with line_to(registry, below=1, pid=7, rank=None) as line:
        line.sendall(b'{"rank": 3}\n{"steps": 4}\n')
        registry.read()
        assert [(child.pid, child.rank, child.steps) for child in registry.below(1)] == [(7, 3, 4)]
        assert not registry.below(2)
        line.sendall(b'{"evidence": 3, "failed": true}\n')
        registry.read()
        assert heard == [(7, 3, 3, False)]
    registry.read()
    assert heard[1:] == [(7, 3, 3, True)]
    assert not registry.below(1)


def test_ends_are_heard_in_the_order_in_which_they_happen(registry, heard):
    lines = [line_to(registry, below=1, pid=pid, rank=pid) for pid in range(5)]
    registry.read()
    for pid in (3, 0, 4, 1, 2):
        lines[pid].close()
    registry.read()
    assert [pid for pid, *_ in heard] == [3, 0, 4, 1, 2]


def test_a_line_may_come_in_pieces(registry):
    with line_to(registry, below=1, pid=7) as line:
        line.sendall(b'{"steps"')
        registry.read()
        line.sendall(b": 12}\n")
        registry.read()
        assert [child.steps for child in registry.below(1)] == [12]


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"7\n", b"[1]\n", b""])
def test_strangers_are_not_listened_to(registry, heard, said):
    with connect(registry.address) as stranger, line_to(registry, below=1, pid=7):
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        registry.read()
        assert not heard
        assert [child.pid for child in registry.below(1)] == [7]


def test_it_waits_until_a_node_has_ended(registry, heard):
    line = line_to(registry, below=1, pid=7)
    other = line_to(registry, below=2, pid=8)
    registry.read()
    line.close()
    registry.wait_for_ends(1, seconds=60)
    assert [pid for pid, *_ in heard] == [7]
    registry.wait_for_ends(2, seconds=0)
    assert [child.pid for child in registry.below(2)] == [8]
    other.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who connects")
def test_other_users_are_not_listened_to(registry, monkeypatch):
    """They can see the socket's name, and could have any process of this user killed."""
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with line_to(registry, below=1, pid=7) as line:
        registry.read()
        assert not registry.below(1)
        with pytest.raises(ConnectionResetError):
            line.recv(1)
