"""Checks the descriptions of nodes before anything trains there. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plumbline.devices.types import device_type

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
"""The fields of a node's greeting to the launcher, with their types."""

_MOST_PAIRS = 4
"""The largest number of pairs of nodes that a message names. It only counts the others."""


@dataclass(frozen=True)
class Node:
    """One node, as it describes itself.

    ``launcher`` is the address at which the node reached this process. Other nodes reach its ranks through
    ``interface``, at ``address``; ``chosen`` says whether the user named that interface. ``nodes`` is the number of
    nodes, and ``servers`` the number of servers on this node, as set by torchrun or SLURM; None if unknown.
    ``clock_offset`` is how far this process's monotonic clock is ahead of the node's, in seconds.
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
        """Return the node that a greeting, read at ``now``, describes."""
        try:
            said = json.loads(greeting)
        except RecursionError as error:
            raise ValueError("its description is not a JSON object") from error
        if not isinstance(said, dict):
            raise ValueError("its description is not a JSON object")
        for name, kind in _DESCRIPTION.items():
            if name not in said or not isinstance(said[name], kind):
                raise ValueError(f"its description has no valid {name!r}")
        if said["node"] < 0 or not math.isfinite(said["at"]):
            raise ValueError("its number or its time is not valid")
        described = {name: said[name] for name in _DESCRIPTION if name not in ("node", "at")}
        return cls(number=said["node"], clock_offset=now - said["at"], **described)

    @property
    def place(self) -> str:
        return f"{self.host} ({self.address}{f' on {self.interface}' if self.interface else ''})"


def why_not(node: Node, count: int, present: Mapping[int, Node]) -> str | None:
    """Return why ``node`` cannot join as one of ``count`` nodes, of which ``present`` have joined; None if it can."""
    if node.servers not in (None, 1):
        return (
            f"{node.host}: {node.servers} processes were started there (LOCAL_WORLD_SIZE), but Plumbline needs one, "
            "which forks the ranks of the node: use --nproc-per-node 1"
        )
    if node.nodes not in (None, count):
        return (
            f"{node.host} was started as one of {node.nodes} nodes, but Plumbline runs with {count}: use Plumbline's "
            f"--nodes {node.nodes}, or --nnodes {count} of torchrun or srun"
        )
    if node.number >= count:
        return f"{node.host} is node {node.number}, but there are only {count} nodes: number them from 0"
    if node.number in present:
        return (
            f"{present[node.number].place} and {node.place} both have the number {node.number}: "
            "give each node a different number"
        )
    if not node.address:
        return (
            f"{node.host} has no network interface {node.interface} with an IPv4 address: "
            "set GLOO_SOCKET_IFNAME to another one, or unset it"
        )
    return None


def differing(nodes: Sequence[Node]) -> str | None:
    """Return which two nodes have different versions of torch or Python, if any."""
    for node in nodes[1:]:
        both = [(one.software["torch"], one.software["python"]) for one in (nodes[0], node)]
        if both[0] != both[1]:
            texts = [
                f"{one.host} has torch {has[0]} and Python {has[1]}"
                for one, has in zip((nodes[0], node), both, strict=True)
            ]
            return f"{' and '.join(texts)}: use the same environment on all nodes"
    return None


def other_plumbline(nodes: Sequence[Node], here: str) -> str | None:
    """Return which node, if any, has a Plumbline whose hash differs from ``here``, the hash of this process's."""
    for node in nodes:
        if node.software["plumbline"] != here:
            return (
                f"{node.host} has a different Plumbline at the same path: use the same environment on all nodes, or "
                "install the same Plumbline on each"
            )
    return None


def too_few_devices(nodes: Sequence[Node], accelerator: str, wanted: int) -> str | None:
    """Return which nodes, if any, have fewer devices of this type than ``wanted``."""
    present = [node.software["devices"].get(accelerator, 0) for node in nodes]
    least = min(present)
    if least >= wanted:
        return None
    counts = ", ".join(f"{node.host} {count}" for node, count in zip(nodes, present, strict=True))
    way = f"use --gpus {least}, or leave out nodes with too few" if least else "leave out nodes without any"
    label = device_type(accelerator).label
    return f"cells need {wanted} {label} devices per node, but the nodes have: {counts}. To run, {way}."


def cut_off(nodes: Mapping[int, Node], failed: Collection[tuple[int, int, str]]) -> str | None:
    """Return which nodes cannot reach which others, if any. ``failed`` has triples of source, target and reason."""
    if not failed:
        return None
    pairs = [f"{nodes[who].host} cannot reach {nodes[whom].place}: {why}" for who, whom, why in sorted(failed)]
    more = f"; and {len(pairs) - _MOST_PAIRS} more" if len(pairs) > _MOST_PAIRS else ""
    loopback = [nodes[whom] for _, whom, _ in failed if nodes[whom].address.startswith("127.")]
    way = "check firewalls and routes"
    if loopback:
        named = "GLOO_SOCKET_IFNAME" if loopback[0].chosen else "the way to the launcher"
        way = (
            f"{named} is {loopback[0].interface} on {loopback[0].host}, a loopback interface that other hosts cannot "
            "reach: set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts"
        )
    return f"{'; '.join(pairs[:_MOST_PAIRS])}{more}: {way}"
