"""Recognizes collectives, and counts how often this process has communicated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed

from plumbline.recording.patching import attempt, wrap
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


_MESSAGES: Counter[str] = Counter()
"""The number of messages so far, by process group name, sender, receiver, and whether this rank sent or received."""

_NUMBERED: Counter[str] = Counter()
"""How many of these messages the sequence number of each process group counts."""

_SENT, _RECEIVED, _ANY = "sent", "received", "any"


def follow_messages() -> None:
    """Count point-to-point messages from now on: only gloo counts them, and as collectives."""
    if torch.distributed.is_available():
        groups: Any = torch.distributed.ProcessGroup
        wrap(groups, "send", lambda *args, **kwargs: _counted(_SENT, *args, **kwargs))
        for name in ("recv", "recv_anysource"):
            wrap(groups, name, lambda *args, **kwargs: _counted(_RECEIVED, *args, **kwargs))


def _counted(what: str, original: Callable[..., Any], group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    before = attempt(group._get_sequence_number_for_group)
    work = original(group, tensors, *args, **kwargs)
    after = attempt(group._get_sequence_number_for_group)
    # The arguments of ``recv_anysource`` are only a tag.
    other = args[0] if len(args) > 1 else _ANY
    link = f"{group.rank()}>{other}" if what == _SENT else f"{other}>{group.rank()}"
    _MESSAGES[f"{group.group_name} {link} {what}"] += 1
    _NUMBERED[str(group.group_name)] += (after or 0) - (before or 0)
    return work


def all_arrive(every: Iterable[Mapping[str, int]]) -> bool:
    """Return whether the messages that ranks send are those that they receive, judging by all ranks' counts."""
    sent, received = Counter[str](), Counter[str]()
    for own in every:
        for key, count in own.items():
            link, _, what = key.rpartition(" ")
            (sent if what == _SENT else received)[link] += count
    known = {link: count for link, count in received.items() if f" {_ANY}>" not in link}

    def into(counts: Mapping[str, int]) -> Counter[str]:
        found = Counter[str]()
        for link, count in counts.items():
            group, _, ends = link.rpartition(" ")
            found[f"{group} {ends.partition('>')[-1]}"] += count
        return found

    return into(sent) == into(received) and all(count <= sent[link] for link, count in known.items())


def group_of(name: str) -> str:
    """Return the process group of a name in ``collectives``."""
    return name.partition(" ")[0]


def collectives() -> dict[str, int]:
    """Return the number of collectives so far, by process group name, and of messages, by names that begin with it.

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
            counts[str(name)] = group._get_sequence_number_for_group() - _NUMBERED[str(name)]
        except RuntimeError:
            continue
    return counts | _MESSAGES


def communicates_beside(call: TrackedCall, inner: Sequence[Mapping[str, int]]) -> bool:
    """Return whether a running call has communicated since it began, apart from its parts with the counts ``inner``."""
    return any(count > sum(one.get(name, 0) for one in inner) for name, count in since(call.collectives).items())


def since(before: Mapping[str, int]) -> dict[str, int]:
    """Return how many collectives and messages there were since ``collectives`` returned ``before``."""
    return {name: now - before.get(name, 0) for name, now in collectives().items()}
