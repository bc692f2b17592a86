"""Recognizes collectives, and counts how often this process has communicated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed

from plumbline.replay.call import TrackedCall

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})

_WAITS = frozenset({"wait_tensor", "_wrap_tensor_autograd"})


def is_collective(func: Any) -> bool:
    """Return whether an operator communicates, or waits for communication."""
    return isinstance(func, torch._ops.OpOverload) and func.namespace in _NAMESPACES


def members_of_groups() -> dict[str, list[int]]:
    """Return the ranks of each process group that this rank is in, by the group's name."""
    world: Any = torch.distributed.distributed_c10d._world
    ranks_of = world.pg_group_ranks
    return {str(name): sorted(ranks_of[group]) for group, name in world.pg_names.items() if group in ranks_of}


def groups_in(arguments: Iterable[Any]) -> list[str]:
    """Return the process group names among a collective's arguments; empty for operators that only wait."""
    known = members_of_groups()
    groups: Any = torch.distributed.ProcessGroup
    boxed = [one for one in arguments if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())]
    named = [one for one in arguments if isinstance(one, str) and one in known]
    return [*named, *(str(groups.unbox(one).group_name) for one in boxed)]


def reaches_others(func: Any, arguments: Sequence[Any]) -> bool:
    """Return whether a collective communicates with other ranks than this one."""
    if func._schema.name.partition("::")[2] in _WAITS:
        return False
    members = members_of_groups()
    groups = groups_in(arguments)
    return not groups or any(len(members.get(one, ())) != 1 for one in groups)


def collectives() -> dict[str, int]:
    """Return the number of collectives and point-to-point messages so far, by process group name.

    Groups of one rank are left out, and backends that do not count them.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    counts: dict[str, int] = {}
    c10d: Any = torch.distributed.distributed_c10d
    for group, name in list(c10d._world.pg_names.items()):
        if len(c10d._world.pg_group_ranks.get(group, ())) == 1:
            continue
        try:
            counts[str(name)] = group._get_sequence_number_for_group()
        except RuntimeError:
            continue
    return counts


def communicates_beside(call: TrackedCall, inner: Sequence[TrackedCall]) -> bool:
    """Return whether a running call has communicated since it began, apart from the calls ``inner`` inside it."""
    return any(
        count - call.collectives.get(name, 0) > sum(one.collectives.get(name, 0) for one in inner)
        for name, count in collectives().items()
    )
