"""Which nodes may take part: their descriptions are checked before anything trains there. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_DESCRIPTION: dict[str, Any] = {
    "node": int,
    "host": str,
    "launcher": str,
    "interface": str,
    "address": str,
    "chosen": bool,
    "nodes": (int, type(None)),
    "servers": (int, type(None)),
    "at": float,
}
"""What a node says of itself when it greets the launcher."""

_MOST_PAIRS = 4
"""So many pairs of nodes that cannot reach each other are named; the others are counted."""


@dataclass(frozen=True)
class Node:
    """One node, as it describes itself.

    ``launcher`` is the address at which it reached this process. ``interface`` and ``address`` are those by which other
    nodes reach its ranks; ``chosen``: the user named that interface. ``nodes`` and ``servers`` are the numbers of
    nodes, and of servers on this one, that torchrun or SLURM has set, None where unknown. ``clock_offset`` is how far
    this process' monotonic clock is ahead of the node's, in seconds.
    """

    number: int
    host: str
    launcher: str
    interface: str
    address: str
    chosen: bool
    nodes: int | None
    servers: int | None
    clock_offset: float
    software: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, greeting: bytes, now: float) -> Node:
        """Return the node that a greeting, read at ``now``, describes.

        Raises:
            ValueError: it describes none; the message says what is missing.
        """
        try:
            said = json.loads(greeting)
        except RecursionError as error:
            raise ValueError("its description is no JSON object") from error
        if not isinstance(said, dict):
            raise ValueError("its description is no JSON object")
        for name, kind in _DESCRIPTION.items():
            if name not in said or not isinstance(said[name], kind):
                raise ValueError(f"its description has no right {name!r}")
        if said["node"] < 0 or not math.isfinite(said["at"]):
            raise ValueError("it has no right number, or no right time")
        described = {name: said[name] for name in _DESCRIPTION if name not in ("node", "at")}
        return cls(number=said["node"], clock_offset=now - said["at"], **described)

    @property
    def place(self) -> str:
        return f"{self.host} ({self.address}{f' on {self.interface}' if self.interface else ''})"


def why_not(node: Node, count: int, present: Mapping[int, Node]) -> str | None:
    """Return why a node cannot be one of ``count``, of which some are ``present``; None if it can."""
    if node.servers not in (None, 1):
        return (
            f"{node.host}: {node.servers} processes were started there (LOCAL_WORLD_SIZE), and Plumbline wants one, "
            "which forks the node's ranks itself: take --nproc-per-node 1"
        )
    if node.nodes not in (None, count):
        return (
            f"{node.host} was started as one of {node.nodes} nodes, and Plumbline was asked for {count}: "
            f"make --nodes {node.nodes} of it, or --nnodes {count} of the other"
        )
    if node.number >= count:
        return f"{node.host} says that it is node {node.number}, and there are {count}: count nodes from 0"
    if node.number in present:
        return (
            f"{present[node.number].place} and {node.place} both say that they are node {node.number}: "
            "give each a number of its own"
        )
    if not node.address:
        return (
            f"{node.host} has no network interface {node.interface} with an IPv4 address: "
            "name another one in GLOO_SOCKET_IFNAME, or leave it out"
        )
    return None


def differing(nodes: Sequence[Node]) -> str | None:
    """Return which two nodes run other software, None if all run the same."""
    for node in nodes[1:]:
        both = [(one.software["torch"], one.software["python"]) for one in (nodes[0], node)]
        if both[0] != both[1]:
            texts = [
                f"{one.host} has torch {has[0]} and Python {has[1]}"
                for one, has in zip((nodes[0], node), both, strict=True)
            ]
            return f"{' and '.join(texts)}: ranks of one training need the same, so take one environment for all nodes"
    return None


def other_plumbline(nodes: Sequence[Node], here: str) -> str | None:
    """Return which node runs another Plumbline than this process, whose package's hash is ``here``; None if none."""
    for node in nodes:
        if node.software["plumbline"] != here:
            return (
                f"{node.host} has other files of Plumbline than this process, at the same path: take one environment "
                "for all nodes, or install the same Plumbline on each"
            )
    return None


def too_few_devices(nodes: Sequence[Node], wanted: int) -> str | None:
    """Return which nodes have fewer CUDA devices than ``wanted``, None if none has."""
    if all(node.software["devices"] >= wanted for node in nodes):
        return None
    counts = ", ".join(f"{node.host} {node.software['devices']}" for node in nodes)
    least = min(node.software["devices"] for node in nodes)
    way = f"take --gpus {least}, or leave out who has too few" if least else "leave out who has none"
    return f"cells of {wanted} gpus a node were asked for, and there are, of CUDA devices: {counts}: {way}"


def cut_off(nodes: Mapping[int, Node], failed: Collection[tuple[int, int, str]]) -> str | None:
    """Return which nodes cannot reach which, of triples of who, whom, and why; None if there are none."""
    if not failed:
        return None
    pairs = [f"{nodes[who].host} cannot reach {nodes[whom].place}: {why}" for who, whom, why in sorted(failed)]
    more = f"; and {len(pairs) - _MOST_PAIRS} more" if len(pairs) > _MOST_PAIRS else ""
    loopback = [nodes[whom] for _, whom, _ in failed if nodes[whom].address.startswith("127.")]
    way = "is there a firewall, or no route?"
    if loopback:
        named = "GLOO_SOCKET_IFNAME" if loopback[0].chosen else "the way to the launcher"
        way = (
            f"{named} is {loopback[0].interface} on {loopback[0].host}, and its address leads every host to itself: "
            "name the interface that leads to the others in GLOO_SOCKET_IFNAME"
        )
    return f"{'; '.join(pairs[:_MOST_PAIRS])}{more}: {way}"
