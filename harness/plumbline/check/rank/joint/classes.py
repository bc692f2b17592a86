"""Which ranks hold the same parameter, and which hold parts of their own, from what all ranks say about theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plumbline.recording.observer import Facts

ROUNDINGS = 128
"""Copies of one parameter differ by no more than so many: ranks may add up gradients in different orders."""

Key = tuple[int, int]
"""A rank, and the number of a parameter among those that it holds."""


@dataclass(frozen=True)
class Group:
    """One parameter: its ``instances``, each of which has the keys of the ranks that hold it together.

    Instances are copies of each other. ``size`` is the typical size of an entry. ``is_doubtful``: others have the same
    weights and another gradient, so that they may be copies of this one, or parts that begin alike.
    """

    name: str
    instances: tuple[tuple[Key, ...], ...]
    size: float
    is_doubtful: bool = False

    @property
    def keys(self) -> frozenset[Key]:
        return frozenset(key for instance in self.instances for key in instance)

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for rank, _ in self.keys)


def grouped(held: Sequence[Sequence[Facts]], unit: float) -> list[Group]:
    """Return the parameters of a model from what each rank says, which is the same on all ranks.

    ``unit`` is the unit roundoff of the training.
    """
    most = ROUNDINGS * unit
    instances: dict[tuple[object, ...], list[Key]] = {}
    for rank, own in enumerate(held):
        for number, one in enumerate(own):
            key = one["name"], tuple(one["shape"]), tuple(one["ranks"])
            instances.setdefault(key, []).append((rank, number))
    alike: dict[tuple[object, ...], list[list[list[Key]]]] = {}
    for (name, shape, _), keys in instances.items():
        found = alike.setdefault((name, shape, len(keys)), [])
        of = next((one for one in found if _same(held, one[0], keys, ("weights", "gradient"), most)), None)
        if of is None:
            found.append([keys])
        else:
            of.append(keys)
    groups = []
    for (name, *_), found in alike.items():
        for copies in found:
            others = (other for other in found if other is not copies)
            doubtful = any(_same(held, copies[0], other[0], ("weights",), most) for other in others)
            size = max(held[rank][number]["size"] for rank, number in copies[0]) or 1.0
            groups.append(Group(str(name), tuple(map(tuple, copies)), size, doubtful))
    return groups


def _same(
    held: Sequence[Sequence[Facts]], ours: Sequence[Key], theirs: Sequence[Key], what: Sequence[str], most: float
) -> bool:
    return all(
        _near(held[a][i][kind], held[b][j][kind], most)
        for (a, i), (b, j) in zip(ours, theirs, strict=True)
        for kind in what
    )


def _near(ours: Sequence[float], theirs: Sequence[float], most: float) -> bool:
    if len(ours) != len(theirs):
        return False
    apart = sum((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))
    size = max(sum(a * a for a in ours), sum(b * b for b in theirs))
    return apart <= most**2 * size
