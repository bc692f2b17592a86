"""What communicates, and how often this process has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed

from plumbline.replay.call import TrackedCall

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})


def is_collective(func: Any) -> bool:
    """Return whether an operator communicates, or waits for what does."""
    return isinstance(func, torch._ops.OpOverload) and func.namespace in _NAMESPACES


def members_of_groups() -> dict[str, list[int]]:
    """Return the ranks of each process group that this rank is in, by the group's name."""
    world: Any = torch.distributed.distributed_c10d._world
    ranks_of = world.pg_group_ranks
    return {str(name): sorted(ranks_of[group]) for group, name in world.pg_names.items() if group in ranks_of}


def collectives() -> dict[str, int]:
    """Return the collectives, and messages to single ranks, of each process group so far, by the group's name.

    Backends that do not count them are left out.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    counts: dict[str, int] = {}
    c10d: Any = torch.distributed.distributed_c10d
    for group, name in list(c10d._world.pg_names.items()):
        try:
            counts[str(name)] = group._get_sequence_number_for_group()
        except RuntimeError:
            continue
    return counts


def communicates_beside(call: TrackedCall, inner: Sequence[TrackedCall]) -> bool:
    """Return whether a call that has begun has communicated since then, but not in the calls inside it."""
    return any(
        count - call.collectives.get(name, 0) > sum(one.collectives.get(name, 0) for one in inner)
        for name, count in collectives().items()
    )
