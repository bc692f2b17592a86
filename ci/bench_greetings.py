"""Measures how long nodes take to join a launcher: alone, beside silent connections, and under hostile greetings.

    python ci/bench_greetings.py                       # 1000 silent connections, 200 joins, into reports/greetings.md
    python ci/bench_greetings.py --silent 100 --joins 20 --hostile 1000 --report FILE

The launcher, the nodes and the strangers are separate processes. A join lasts from the node's first attempt to connect,
including failed attempts, until the launcher has proved that it knows the token. Exits with 1 if a join took more than
two seconds, or if a replayed greeting was accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from plumbline.launch.remote.node_listener import MOST_GREETINGS, NodeListener, NodeProcesses
from plumbline.launch.start_wait import StartWait
from plumbline.worker.authenticated_channel import AuthenticatedChannel, greet
from plumbline.worker.node_server import _connect, _description

TOKEN = "a token of this measurement"
LIMIT_S = 2.0
REPORT = Path(__file__).parents[1] / "reports" / "greetings.md"

_HEAD = """# Nodes that join a launcher

How long a node takes to join: `{command}`, {cores} cores, load average {load:.1f}.
Strangers connect from a separate process, all at once; *again* means that they reconnect whenever they are turned
away. A launcher greets {most} at a time; one more ends the oldest.

| other connections | joins | median, ms | worst, ms | worst, × alone | turned away | last reason |
|---|--:|--:|--:|--:|--:|---|
"""


def main() -> int:
    """Measure, or run one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silent", type=int, default=1000, help="connections that say nothing (default: %(default)s)")
    parser.add_argument("--joins", type=int, default=200, help="nodes that join (default: %(default)s)")
    parser.add_argument("--hostile", type=int, default=100_000, help="hostile greetings (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=REPORT, metavar="FILE", help="where the table goes")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        role, port, count = options.inside[0], int(options.inside[1]), int(options.inside[2])
        {"nodes": nodes, "silent": silent, "again": again, "hostile": hostile}[role](("127.0.0.1", port), count)
        return 0
    command = " ".join(["python", "ci/bench_greetings.py", *sys.argv[1:]])
    told = [
        _HEAD.format(command=command, cores=os.cpu_count(), load=os.getloadavg()[0], most=MOST_GREETINGS).rstrip("\n")
    ]
    alone, slowest = 0.0, 0.0
    for role, count in (("", 0), ("silent", options.silent), ("again", options.silent), ("hostile", options.hostile)):
        times, refused = measure(role, count, options.joins)
        alone = alone or max(times)
        slowest = max(slowest, *times)
        beside = {
            "": "none",
            "silent": f"{count} silent connections",
            "again": f"{count} silent connections, again",
            "hostile": f"{count} hostile greetings, 50 at a time",
        }[role]
        number, _, reason = refused.partition(" ")
        figures = f"{1e3 * statistics.median(times):.1f} | {1e3 * max(times):.1f} | {max(times) / alone:.1f}"
        said = reason.partition("from 127.0.0.1: ")[2].replace("|", "\\|") or "–"
        told.append(f"| {beside} | {len(times)} | {figures} | {number or 0} | {said} |")
        print(told[-1], flush=True)
    taken = replay()
    told += ["", f"A replayed greeting was {'TAKEN' if taken else 'refused'}."]
    options.report.write_text("\n".join(told) + "\n", encoding="utf-8")
    print(f"In all: the slowest join took {slowest:.2f} s; a replayed greeting was {'TAKEN' if taken else 'refused'}")
    return int(taken or slowest > LIMIT_S)


def measure(role: str, count: int, joins: int) -> tuple[list[float], str]:
    """Return the seconds that each join took beside ``count`` strangers, and whom the launcher turned away."""
    listener = NodeListener(("127.0.0.1", 0), TOKEN)
    processes = NodeProcesses([], {})
    strangers = inside(role, listener.port, count) if role else None
    if strangers:
        assert strangers.stdout is not None
        strangers.stdout.readline()  # all strangers are connected
    joining = inside("nodes", listener.port, joins)
    received = listener.receive(joins, processes, StartWait(lambda: 0.0)) if role != "hostile" else []
    printed, _ = joining.communicate()
    if strangers and role == "hostile":
        strangers.communicate()
        received = listener.receive(joins, processes, StartWait(lambda: 0.0))
    for _, channel in received:
        channel.close()
    if strangers:
        strangers.terminate()
        strangers.wait()
    processes.close(0)
    return json.loads(printed), listener.refusals


def inside(role: str, port: int, count: int) -> subprocess.Popen[str]:
    """Start a process of this program with one role in the measurement."""
    command = [sys.executable, __file__, "--inside", role, str(port), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def nodes(place: tuple[str, int], count: int) -> None:
    """Join repeatedly, as a node's server does, and print how long each join took."""

    def begin(connection: socket.socket, host: str) -> AuthenticatedChannel:
        return greet(connection, TOKEN, _description(len(times), host, connection))

    times: list[float] = []
    for _ in range(count):
        begun = time.monotonic()
        _connect([place], begin)
        times.append(time.monotonic() - begun)
    print(json.dumps(times))


def silent(place: tuple[str, int], count: int) -> None:
    """Open connections and stay silent."""
    kept = [socket.create_connection(place) for _ in range(count)]
    print("there", flush=True)
    time.sleep(3600)
    del kept


def again(place: tuple[str, int], count: int) -> None:
    """Open connections, stay silent, and replace each one that is closed."""
    selector = selectors.DefaultSelector()
    for _ in range(count):
        selector.register(socket.create_connection(place), selectors.EVENT_READ)
    print("there", flush=True)
    while True:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            with contextlib.suppress(ConnectionError):
                if key.fileobj.recv(1 << 10):
                    continue
            selector.unregister(key.fileobj)
            key.fileobj.close()
            with contextlib.suppress(ConnectionError):
                selector.register(socket.create_connection(place), selectors.EVENT_READ)


def hostile(place: tuple[str, int], count: int) -> None:
    """Send damaged greetings, 50 at a time."""
    print("there", flush=True)
    mistakes = bad_greetings()
    for _ in range(0, count, 50):
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(socket.create_connection(place)) for _ in range(50)]
            for connection in opened:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(next(mistakes))


def bad_greetings() -> Iterator[bytes]:
    """Yield recorded greetings, whole and damaged, and noise."""
    drawn = random.Random(0)
    recorded = record()
    while True:
        place = drawn.randrange(len(recorded))
        noise = drawn.randbytes(drawn.randrange(1, 9))
        yield recorded
        yield recorded[:place] + noise + recorded[place + len(noise) :]
        yield recorded[:place]
        yield drawn.randbytes(drawn.randrange(6000))


def record() -> bytes:
    """Return what a node sends to a launcher when it joins."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        listener = NodeListener(("127.0.0.1", 0), TOKEN)
        node = inside("nodes", proxy.getsockname()[1], 1)
        one, _ = proxy.accept()
        with one, socket.create_connection(("127.0.0.1", listener.port)) as other:
            one.sendall(other.recv(1 << 13))
            recorded = one.recv(1 << 13)
            other.sendall(recorded)
            one.sendall(other.recv(1 << 13))
            node.communicate()
        listener.close()
    return recorded


def replay() -> bool:
    """Replay a recorded greeting; return whether the launcher accepts it."""
    recorded = record()
    listener = NodeListener(("127.0.0.1", 0), TOKEN)
    with socket.create_connection(("127.0.0.1", listener.port)) as connection:
        connection.recv(1 << 13)
        connection.sendall(recorded)
        answer = connection.recv(1 << 13)
    listener.close()
    return bool(answer)


if __name__ == "__main__":
    sys.exit(main())
