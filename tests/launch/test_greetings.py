"""A launcher greets several connections at a time; strangers are turned away, counted and reported."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.errors import LaunchError, PlanError
from plumbline.launch.launchers import find_launcher, hosts, slurm
from plumbline.launch.launchers.slurm import addresses_of_nodes
from plumbline.launch.pool import WORKER, LauncherOptions
from plumbline.launch.remote import node_listener
from plumbline.launch.remote.node_checks import Node
from plumbline.launch.remote.node_listener import NodeListener, NodeProcesses
from plumbline.launch.remote.remote_pool import RemotePool
from plumbline.launch.start_wait import StartWait
from plumbline.trainer.environments import free_port
from plumbline.worker import authenticated_channel
from plumbline.worker.authenticated_channel import (
    LAUNCHER,
    LONGEST_GREETING,
    LONGEST_MESSAGE,
    NODE,
    AuthenticatedChannel,
    ChannelError,
    Handshake,
    IncomingMessages,
    LauncherGreeting,
    greet,
)
from plumbline.worker.node_server import TOKEN

TOKEN_OF_RUN = "the token of this run"
LONG = 600.0
"""Seconds after which something hangs."""


def description(number=0, **changed):
    told = {"node": number, "host": f"host{number}", "launcher": "127.0.0.1", "interface": "lo", "chosen": False}
    told |= {"address": "127.0.0.1", "nodes": None, "servers": None, "at": time.monotonic()}
    return json.dumps(told | changed).encode()


class Recorded:
    """A node's connection that keeps what it sends."""

    def __init__(self, connection):
        self._connection = connection
        self.sent = b""

    def sendall(self, data):
        self.sent += data
        self._connection.sendall(data)

    def __getattr__(self, name):
        return getattr(self._connection, name)


def greeted(token=TOKEN_OF_RUN, answer=lambda handshake: handshake.proof(LAUNCHER)):
    """Greet over a pair of sockets; return the launcher's channel, the node's, and the recorded connection."""
    mine, other = socket.socketpair()
    node = Recorded(other)
    made = {}

    def launcher():
        greeting = LauncherGreeting(TOKEN_OF_RUN)
        mine.sendall(greeting.challenge)
        with contextlib.suppress(ChannelError):
            while (handshake := greeting.feed(mine.recv(1 << 13))) is None:
                pass
            mine.sendall(answer(handshake))
            made["launcher"] = AuthenticatedChannel(mine, handshake, LAUNCHER)
            return
        mine.close()

    serving = threading.Thread(target=launcher)
    serving.start()
    try:
        channel = greet(node, token, b"hello")
    finally:
        serving.join()
        if "launcher" not in made:
            other.close()
    return made["launcher"], channel, node


@pytest.fixture
def both():
    launcher, node, recorded = greeted()
    yield launcher, node, recorded
    launcher.close()
    node.close()


def test_messages_arrive_as_they_were_sent_and_the_token_does_not_cross_the_network(both):
    launcher, node, recorded = both
    for message in (b"", b"one", b"x" * 70_000):
        node.send(message)
    got = []
    while len(got) < 3:
        got += launcher.receive()
    assert got == [b"", b"one", b"x" * 70_000]
    launcher.send(b"end")
    assert node.receive() == [b"end"]
    assert TOKEN_OF_RUN.encode() not in recorded.sent
    launcher.close()
    assert node.receive() is None


def test_a_recorded_greeting_that_is_played_again_is_refused(both):
    recorded = both[2].sent
    with pytest.raises(ChannelError, match="replays a recorded greeting"):
        LauncherGreeting(TOKEN_OF_RUN).feed(recorded)


def test_what_one_end_said_does_not_open_the_other():
    greeting = LauncherGreeting(TOKEN_OF_RUN)
    nonce = greeting.challenge[-32:]
    reflected = greeting.challenge + b"\0\2{}" + Handshake(TOKEN_OF_RUN.encode(), nonce, nonce, b"{}").proof(LAUNCHER)
    with pytest.raises(ChannelError, match="proof is wrong"):
        greeting.feed(reflected)
    with pytest.raises(ChannelError, match="does not know the token"):
        greeted(answer=lambda handshake: handshake.proof(NODE))
    with pytest.raises(ChannelError, match="the same token"):
        greeted(token="another token")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "it uses another protocol.*GET / HTTP"),
        (b"plumbline nodes 1\n" + bytes(32) + b"\xff\xff", f"65535 bytes; the limit is {LONGEST_GREETING}"),
        (b"plumbline nodes 1\n" + bytes(32) + b"\0\0" + bytes(33), "it sent more than its greeting"),
    ],
)
def test_what_is_no_greeting_is_refused_with_a_sentence(said, why):
    with pytest.raises(ChannelError, match=why):
        LauncherGreeting(TOKEN_OF_RUN).feed(said)
    with pytest.raises(ChannelError):
        one_by_one(LauncherGreeting(TOKEN_OF_RUN).feed, said)


def one_by_one(feed, data):
    """Feed the bytes one at a time, like a slow network; return all results."""
    return [got for byte in data for got in feed(bytes([byte])) or ()]


HANDSHAKE = Handshake(b"token", b"l" * 32, b"n" * 32, b"")
SENT = [b"first", b"", b"third"]


@cache
def stream(role=NODE):
    """Return the messages that an end sends."""
    mine, other = socket.socketpair()
    with mine, other:
        channel = AuthenticatedChannel(mine, HANDSHAKE, role)
        parts = []
        for message in SENT:
            channel.send(message)
            parts.append(other.recv(1 << 16))
    return parts


@given(st.integers(0, 200), st.integers(0, 8), st.binary(max_size=80))
def test_of_a_changed_stream_only_what_was_sent_before_the_change_is_taken(place, lost, noise):
    whole = b"".join(stream())
    changed = whole[:place] + noise + whole[place + lost :]
    incoming, taken = IncomingMessages(HANDSHAKE.key(NODE)), []
    with contextlib.suppress(ChannelError):
        for byte in changed:
            taken += incoming.feed(bytes([byte]))
    assert taken == SENT[: len(taken)]
    if changed == whole:
        assert taken == SENT


def test_messages_that_are_repeated_left_out_reflected_or_too_long_end_the_channel():
    first, second, third = stream()
    for bad, why in (
        ((first, first), "message 0 came instead of 1"),
        ((first, third), "message 2 came instead of 1"),
        ((first[:-1] + bytes([first[-1] ^ 1]),), "the MAC of message 0 is wrong"),
        ((stream(LAUNCHER)[0],), "the MAC of message 0 is wrong"),
        (((0).to_bytes(8, "big") + (LONGEST_MESSAGE + 1).to_bytes(4, "big"),), "the limit is"),
    ):
        with pytest.raises(ChannelError, match=why):
            IncomingMessages(HANDSHAKE.key(NODE)).feed(b"".join(bad))
    assert IncomingMessages(HANDSHAKE.key(NODE)).feed(first + second + third) == SENT


@pytest.fixture
def listener():
    opened = NodeListener(("127.0.0.1", 0), TOKEN_OF_RUN)
    yield opened
    opened.close()


def join(listener, number=0, **changed):
    connection = socket.create_connection(("127.0.0.1", listener.port))
    return greet(connection, TOKEN_OF_RUN, description(number, **changed))


def receive(listener, count):
    processes = NodeProcesses([], {})
    try:
        return listener.receive(count, processes, StartWait(lambda: 0.0))
    finally:
        processes.close(0)


def until(holds):
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


def test_nodes_join_beside_connections_that_say_nothing_or_nonsense(listener):
    place = ("127.0.0.1", listener.port)
    with contextlib.ExitStack() as strangers:
        silent = [strangers.enter_context(socket.create_connection(place)) for _ in range(300)]
        noisy = strangers.enter_context(socket.create_connection(place))
        noisy.sendall(b"x" * 100_000)
        joined = [join(listener, 1), join(listener, 0)]
        nodes = receive(listener, 2)
        assert [node.host for node, _ in nodes] == ["host0", "host1"]
        nodes[0][1].send(b"welcome")
        assert joined[1].receive() == [b"welcome"]
        assert silent[-1].recv(1 << 10).startswith(b"plumbline nodes 1\n")
        assert silent[-1].recv(1) == b"", "nobody is greeted any more"
    count = int(listener.refusals.split()[0])
    assert count >= 300 + 1 - node_listener.MOST_GREETINGS, "the oldest made room"
    for channel in (*joined, *(channel for _, channel in nodes)):
        channel.close()


def test_one_that_is_too_slow_is_turned_away_and_said_where_a_start_fails(monkeypatch, listener):
    monkeypatch.setattr(node_listener, "GREETING_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", listener.port)) as slow:
        slow.sendall(b"plumb")
        until(lambda: listener.refusals)
    processes = NodeProcesses([["true"]], {})
    with pytest.raises(LaunchError, match=r"0 of 1 nodes connected; true ended .*; 1 connection was rejected") as error:
        listener.receive(1, processes, StartWait(lambda: 0.0))
    assert "the last one from 127.0.0.1: it sent only 5 bytes of a greeting in 0.05 s" in str(error.value)
    processes.close(0)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"nothing", "Expecting value"),
        (b"[" * 4000, "not a JSON object"),
        (description(host=3), "no valid 'host'"),
        (description().replace(b"servers", b"serving"), "no valid 'servers'"),
        (description(at=float("nan")), "its number or its time is not valid"),
        (description(node=-1), "its number or its time is not valid"),
    ],
)
def test_a_node_that_does_not_describe_itself_is_turned_away(listener, said, why):
    with pytest.raises(ValueError, match=why):
        Node.of(said, 0.0)
    connection = socket.create_connection(("127.0.0.1", listener.port))
    with connection, pytest.raises(ChannelError):
        greet(connection, TOKEN_OF_RUN, said)
    assert why in listener.refusals


def test_a_message_that_was_changed_on_the_way_ends_the_pool_with_a_sentence():
    nodes = []

    def by_hand(port):
        connection = socket.create_connection(("127.0.0.1", port))
        nodes.append((connection, greet(connection, TOKEN_OF_RUN, description())))
        return []

    pool = RemotePool("torch", 1, by_hand, ("127.0.0.1", 0), TOKEN_OF_RUN)
    ((connection, channel),) = nodes
    channel.send(
        json.dumps({"event": "late", "at": 0.0, "launch": 0, "rank": 0, "steps": 0, "stopped": False}).encode()
    )
    connection.sendall(bytes(100))
    with pytest.raises(LaunchError, match="the fork server of torch on host0: message 0 came instead of 1"):
        _ = pool.subjects
    assert not pool.alive
    connection.close()


class ChangingProxy:
    """A network between a node and the launcher at ``port``; on request, it changes a bit of what it forwards."""

    def __init__(self, port):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._launcher = port
        self.changes = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        node, _ = self._listener.accept()
        launcher = socket.create_connection(("127.0.0.1", self._launcher))
        threading.Thread(target=self._forward, args=(node, launcher), daemon=True).start()
        self._forward(launcher, node, changing=True)

    def _forward(self, source, sink, *, changing=False):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if changing and self.changes.is_set():
                    data = data[:20] + bytes([data[20] ^ 1]) + data[21:]
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        self._listener.close()


def test_a_server_whose_commands_are_changed_on_the_way_obeys_none_of_them_and_says_so():
    proxies = []

    def start_commands(port):
        proxies.append(ChangingProxy(port))
        return [[sys.executable, str(WORKER), "--connect", f"127.0.0.1:{proxies[0].port}", "--as-node", "0", "torch"]]

    pool = RemotePool("torch", 1, start_commands, ("127.0.0.1", 0))
    try:
        assert pool.subjects
        pool.wait_until_idle()
        proxies[0].changes.set()
        with pytest.raises(
            LaunchError,
            match=r"it closed the connection: plumbline.worker: lost the connection to the launcher: the MAC of",
        ):
            pool.wait_until_idle()
    finally:
        pool.close()
        proxies[0].close()


def listening(address):
    """Return the ports and addresses at which this process listens; with ``address``, only those there."""
    mine = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists() or file.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.append(words[1].split(":")[0])
    return [one for one in found if re.fullmatch(address, one)]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux tells who listens where")
def test_nothing_listens_at_all_addresses(monkeypatch):
    monkeypatch.setenv(TOKEN, TOKEN_OF_RUN)
    before = len(listening("0+"))
    asked = LauncherOptions(2, rendezvous=f"127.0.0.1:{free_port()}", notify=lambda _: None)
    launcher = find_launcher("torchrun", asked)
    pool = launcher.pool("torch", None)
    assert len(listening("0100007F")) >= 2, "the nodes' listener, and torchrun's rendezvous store"
    assert len(listening("0+")) == before
    pool.close()


def test_a_short_token_is_refused(monkeypatch):
    with pytest.raises(LaunchError, match=f"{TOKEN} has 4 characters.*openssl rand -hex 32"):
        NodeListener(("127.0.0.1", 0), "ours")


def test_it_listens_at_the_one_address_that_its_nodes_reach(monkeypatch):
    assert slurm.address_towards(["127.0.0.1", "localhost"]) == "127.0.0.1"
    with pytest.raises(PlanError, match=r"several addresses \(there are no nodes\)"):
        slurm.address_towards([])
    monkeypatch.setattr(hosts, "addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.1"})
    assert hosts.only_address() == "10.0.0.1"
    monkeypatch.setattr(hosts, "addresses", lambda: {"eth0": "10.0.0.1", "docker0": "172.17.0.1"})
    with pytest.raises(PlanError, match=r"10.0.0.1 on eth0, 172.17.0.1 on docker0\): .*--listen ADDRESS"):
        hosts.only_address()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PlanError, match=r"scontrol does not report .*--listen ADDRESS"):
        addresses_of_nodes()


def test_a_launcher_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(authenticated_channel, "GREETING_TIMEOUT_S", 0.05)
    mine, other = socket.socketpair()
    with mine, other, pytest.raises(TimeoutError):
        greet(mine, TOKEN_OF_RUN, b"")
