"""All parsers, as functions of bytes. Each returns, or raises one of its documented errors.

A target's ``seeds`` are valid inputs from which the fuzzer starts.
"""

from __future__ import annotations

import atexit
import json
import re
import secrets
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, PlumblineError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome, worst
from plumbline.core.topology import Topology
from plumbline.evidence.rank_file import CHECKSUM, NO_CHECKSUM
from plumbline.evidence.read import read_rank
from plumbline.evidence.trace import RankTrace, Step, Tensors, Trace
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, launch
from plumbline.launch.launch_progress import NoEventError, RunningLaunch, event_of
from plumbline.launch.pool import Pool
from plumbline.launch.remote.node_checks import Node
from plumbline.machine.fingerprint import Fingerprint
from plumbline.planning.expectation_files import read_expectations
from plumbline.planning.plan import Matrix, plan
from plumbline.report.markdown import support_page
from plumbline.report.terminal import support_for_terminal
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Result
from plumbline.results.run import RESULTS, line_of, read_run
from plumbline.subjects.load import parse_subject
from plumbline.trainer.connector import parse_gpus
from plumbline.trainer.environments import first_host
from plumbline.trainer.errors import MisconfigurationError
from plumbline.worker.authenticated_channel import (
    NODE,
    AuthenticatedChannel,
    ChannelError,
    Handshake,
    IncomingMessages,
    LauncherGreeting,
    greet,
)
from plumbline.workloads import WORKLOADS

CELL = Cell("torch", "linear-exact", "ddp", Topology(1, 2), "32", "cpu")


@dataclass(frozen=True)
class Target:
    """A parser: ``what`` it parses, and ``parse``, which gets the fuzzer's bytes and may raise ``refusals``."""

    what: str
    parse: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    refusals: tuple[type[Exception], ...] = (PlumblineError,)

    def answer(self, data: bytes) -> None:
        """Parse ``data``; let all errors through but a refusal that has a message."""
        try:
            self.parse(data)
        except self.refusals as error:
            if not str(error).strip():
                raise AssertionError("a refusal without a message") from error


def text(data: bytes) -> str:
    """Return the bytes as a string from a command line."""
    return data.decode(errors="surrogateescape")


@cache
def folder() -> Path:
    """Return this process's own folder."""
    path = Path(tempfile.mkdtemp(prefix="plumbline-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def names(data: bytes) -> None:
    """Plan a matrix with arbitrary names."""
    backends, _, rest = text(data).partition(";")
    precisions, _, workloads = rest.partition(";")
    chosen = [tuple(part.split(",")) for part in (backends, precisions, workloads)]
    plan(Matrix(2, None, chosen[0], chosen[1], chosen[2]), [])


def results(data: bytes) -> None:
    """Read a run and show it; nothing in it may affect a terminal or a page."""
    (folder() / RESULTS).write_bytes(data)
    run = read_run(folder())
    page, screen = support_page(run), support_for_terminal(run)
    assert "\x1b" not in page + screen, "a control sequence reached the terminal"
    assert "<script" not in page.lower(), "a tag reached the page"


def a_run() -> bytes:
    """Return a small run."""
    header = Header.of([CELL], command=["pytest"], options={"gpus": 2}, fingerprint=Fingerprint(), simulated=True)
    finding = Finding("gradients", Outcome.FAILED, "<script>\x1b[31m", "no-sync", "sync", 3e7, 1, "a.weight", 0)
    found = [Result.of(CELL, finding, "pytest -k it", 0.5)]
    return line_of(header) + b"".join(map(line_of, found)) + line_of(Footer.of(found, 1))


def behind_checksums(lines: bytes) -> bytes:
    """Return lines of results with valid checksums."""
    return re.sub(
        rb'(?m)^(.*),"crc32":"[^"]*"}$', lambda line: line[1] + b',"crc32":"%08x"}' % zlib.crc32(line[1] + b"}"), lines
    )


@cache
def a_trace() -> tuple[bytes, ...]:
    """Return the evidence of two real ranks."""
    pool = Pool(CELL.subject)
    try:
        assert launch(pool, CELL, folder() / "right", Settings(60)).is_whole
    finally:
        pool.close()
    return tuple((folder() / "right" / f"rank-{rank}.safetensors").read_bytes() for rank in range(2))


def behind_checksum(evidence: bytes) -> bytes:
    """Return evidence with a valid checksum."""
    said = re.search(rb'"%s": "([0-9a-f]{8})"' % CHECKSUM.encode(), evidence[:100])
    if said is None:
        return evidence
    before, after = evidence[: said.start(1)], evidence[said.end(1) :]
    return before + b"%08x" % zlib.crc32(before + NO_CHECKSUM.encode() + after) + after


def trace(data: bytes) -> None:
    """Read a rank's evidence and judge it with the other rank's, on a workload where every sum is exact.

    Evidence that differs from the right trainer's must never be found right.
    """
    both = (folder() / "rank-0.safetensors", folder() / "rank-1.safetensors")
    for file, content in zip(both, (data, a_trace()[1]), strict=True):
        file.write_bytes(content)
    ranks = tuple(map(read_rank, both))
    findings = judge(TraceAnalysis(Trace(ranks), WORKLOADS[CELL.workload], CELL))
    right = read_rank(folder() / "right" / both[0].name)
    if not says_the_same(ranks[0], right):
        assert worst(finding.outcome for finding in findings).is_bad, "changed evidence was found right"


def says_the_same(one: RankTrace, other: RankTrace) -> bool:
    """Return whether two ranks have the same samples, gradients and final weights."""
    if len(one.steps) != len(other.steps):
        return False
    return all(
        _samples(mine) == _samples(theirs)
        and all(_equal(getattr(mine, part), getattr(theirs, part)) for part in ("before", "gradients", "after"))
        for mine, theirs in zip(one.steps, other.steps, strict=True)
    )


def _samples(step: Step) -> list[list[int]]:
    return [sorted(micro.samples) for micro in step.micro_batches]


def _equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        isinstance(one[name], Tensor) and one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
        for name in one
    )


def resume(data: bytes) -> None:
    """Look for the run that ``--resume`` names, which can be any path, next to an existing run."""
    (folder() / "latest").mkdir(exist_ok=True)
    (folder() / "latest" / RESULTS).write_bytes(a_run())
    read_run(folder() / text(data))


def expectations(data: bytes) -> None:
    """Read a file of expectations."""
    (folder() / "expectations").mkdir(exist_ok=True)
    (folder() / "expectations" / "torch.toml").write_bytes(data)
    read_expectations(folder() / "expectations")


class Heard(Pool):
    """A pool whose fork server has sent all its messages, and that ignores what it is sent."""

    def __init__(self, said: bytes) -> None:
        self._said = said.split(b"\n")[::-1]

    def _send(self, command: dict[str, object]) -> None:
        pass

    def _next(self, deadline: float) -> dict[str, object]:
        if not self._said:
            raise LaunchError("the fork server died")
        return event_of(self._said.pop())


def events(data: bytes) -> None:
    """Follow a launch of two nodes by their fork server's messages."""
    now = time.monotonic()
    ends = Heard(data).finish(RunningLaunch(1, (0, 2), now, now + 60, ranks_per_process=2))
    assert [end.rank for end in ends] == [0, 2]


def a_launch() -> bytes:
    """Return a fork server's messages about a launch: on each node, one rank ends well and one fails."""
    place, child = {"launch": 1, "rank": 0, "at": 1.0}, {"pid": 7, "as": 1, "trace": None, "steps": 2, "failed": False}
    child |= {"idle": False, "killed": False, "orphaned": False, "out_of_memory": True, "unwritten": None}
    end = {"event": "exit", "code": -9, "steps": 2, "evidence": True, "out_of_memory": False}
    said: list[dict[str, object]] = [
        {"event": "left", **place, **child, "trace": 1},
        {"event": "gone", **place, **child},
        {"event": "reaped", **place, "pid": 7, "code": -11},
        {"event": "raised", **place},
        {"event": "late", **place, "steps": 2, "stopped": True},
        {"event": "unwritten", **place, "why": "No space left on device"},
        {**place, **end},
        {"event": "evidence", **place, "rank": 2},
        {**place, **end, "rank": 2, "code": 0},
    ]
    return "\n".join(map(json.dumps, said)).encode()


TOKEN, NONCE = secrets.token_hex(32), secrets.token_bytes(32)
DESCRIPTION = (
    b'{"node": 0, "host": "a", "launcher": "b", "interface": "eth0", "address": "10.0.0.1", "chosen": false, '
    b'"nodes": 2, "servers": null, "at": 1.5}'
)
HANDSHAKE = Handshake(TOKEN.encode(), NONCE, NONCE, DESCRIPTION)
COMMANDS = [b'{"command": "port"}', b"", b'{"command": "signal", "launch": 1, "signal": 9}', b'{"command": "end"}']


def pieces(data: bytes) -> list[bytes]:
    """Return the bytes in pieces, as a network may deliver them; the first byte determines the pieces."""
    size = data[0] + 1 if data else 1
    return [data[begin : begin + size] for begin in range(1, len(data), size)]


def greeting(data: bytes) -> None:
    """Greet the sender of these bytes; after a zero, read a node's description. No forged greeting may pass."""
    if data[:1] == b"\0":
        Node.of(data[1:], 0.0)
        return
    ours = LauncherGreeting(TOKEN, NONCE)
    for piece in pieces(data):
        handshake = ours.feed(piece)
        assert handshake is None or handshake.greeting == DESCRIPTION, "a forged greeting was accepted"


@cache
def a_greeting() -> bytes:
    """Return what a node that knows the token sends in answer to ``NONCE``."""
    launcher, node = socket.socketpair()
    with launcher, node:
        launcher.sendall(LauncherGreeting(TOKEN, NONCE).challenge)
        launcher.shutdown(socket.SHUT_WR)
        try:
            greet(node, TOKEN, DESCRIPTION)
        except ChannelError:
            return launcher.recv(1 << 13)
    raise AssertionError("there was no answer, but the node joined")


def command_channel(data: bytes) -> None:
    """Read the messages after a greeting; only a prefix of the sent messages may ever be accepted."""
    incoming = IncomingMessages(HANDSHAKE.key(NODE))
    taken: list[bytes] = []
    for piece in pieces(data):
        taken += incoming.feed(piece)
        assert taken == COMMANDS[: len(taken)], "a message was accepted that was never sent"


@cache
def a_channel() -> tuple[bytes, ...]:
    """Return all messages of a channel, as they are sent."""
    mine, other = socket.socketpair()
    with mine, other:
        channel = AuthenticatedChannel(mine, HANDSHAKE, NODE)
        for command in COMMANDS:
            channel.send(command)
        sent = other.recv(1 << 16)
    return bytes([3]) + sent, bytes([255]) + sent


ENTRY = b"""measured = "torch 2.13.0"
[[expected]]
check = ["gradients", "update"]
cell = { workload = "mlp*", backend = ["ddp"], topology = "1x3", precision = "32" }
outcome = "failed"
reason = "because"
"""

TARGETS = {
    "gpus": Target(
        "`gpus=` of the reference trainer",
        lambda data: parse_gpus(text(data), 8),
        lambda: [b"0, 1", b"-1", b"3,"],
        (MisconfigurationError,),
    ),
    "hosts": Target(
        "SLURM's lists of hosts",
        lambda data: first_host(text(data)),
        lambda: [b"node[1-3,07],b4", b"a[1-2]b[3]"],
        (MisconfigurationError,),
    ),
    "subject": Target(
        "`--subject`", lambda data: parse_subject(text(data)), lambda: [b"my.py::a;python=/bin/sh", b"torch"]
    ),
    "names": Target("`--backends`, `--precisions`, `--workloads`", names, lambda: [b"ddp,dp;32,16;mlp,uneven"]),
    "resume": Target("the argument of `--resume`", resume, lambda: [b"latest", b"latest/../latest/results.jsonl"]),
    "results": Target("`results.jsonl`, and the pages made of it", results, lambda: [a_run()]),
    "results-behind-checksums": Target(
        "the same, but each line has the right checksum",
        lambda data: results(behind_checksums(data)),
        lambda: [a_run()],
    ),
    "trace": Target("a rank's evidence, and the verdict on it", trace, lambda: list(a_trace())),
    "trace-behind-checksum": Target(
        "the same, but the file has the right checksum",
        lambda data: trace(behind_checksum(data)),
        lambda: list(a_trace()),
    ),
    "expectations": Target("files of expectations", expectations, lambda: [ENTRY]),
    "events": Target(
        "what a fork server reports about a launch", events, lambda: [a_launch()], (PlumblineError, NoEventError)
    ),
    "greeting": Target(
        "the greeting of clients that connect to a launcher, and a node's description",
        greeting,
        lambda: [b"\0" + DESCRIPTION, b"\xff" + a_greeting()],
        (ChannelError, ValueError),
    ),
    "command-channel": Target(
        "messages after a greeting: their numbers, lengths and MACs",
        command_channel,
        lambda: list(a_channel()),
        (ChannelError,),
    ),
}
