"""Tells from the descriptions by all ranks which of them hold the same parameter, and which hold separate parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from plumbline.recording.observer import Facts

ROUNDINGS = 128
"""Copies of one parameter differ by at most this many unit roundoffs: ranks may add up gradients in different
orders."""

ROUNDINGS_16_BIT = 16
"""The same in 16-bit formats, where operators sum in float32 and round only their results. 128 roundoffs would be half
of a gradient in bfloat16, and gradients of different samples may differ by less than that."""

COARSE = 2.0**-12
"""Formats with at least this unit roundoff count as 16-bit formats: float16 has 2⁻¹¹."""

LIMIT = 2.0**7
"""Largest error of a right gradient, in multiples of the noise: the square root of 16,384, the number of terms of a
sum. The rounding error of a sum grows with the square root of this number (Higham, Accuracy and Stability of Numerical
Algorithms, 2.8), and ``Rounding`` models only one rounding for a whole operator."""

LIMIT_16_BIT = 2.0**4
"""The same in 16-bit formats, where operators sum in float32 and round only their results. The noise is estimated from
the few numbers that ranks and passes add: four standard deviations, where the true deviation may be four times the
estimate."""

Family = tuple[str, tuple[int, ...], int]
"""A parameter's name, its shape, and the number of ranks that hold it together."""

Instance = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A parameter's name, its shape, and the ranks that hold it together."""


class Kind(NamedTuple):
    """Parameters of one family that can be copies of each other.

    ``beginning`` numbers the values with which they, or another parameter of their layer, began. It is 0 if the whole
    family began alike, or if these values are unknown because the parameters were first compared later than others of
    their family.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    beginning: int = 0

    @property
    def family(self) -> Family:
        return self[:3]


Key = tuple[int, int]
"""A rank, and the number of a parameter on it."""


@dataclass(frozen=True)
class Group:
    """One parameter. Its ``instances`` are copies of each other; each has the keys of the ranks that hold it together.

    ``size`` is the typical size of an entry. ``is_doubtful``: other groups of the same kind began with the same values,
    so they can be meant either as copies of this one or as parts. ``is_layer``: such groups are known to be layers of
    different pipeline stages.
    """

    kind: Kind
    instances: tuple[tuple[Key, ...], ...]
    size: float
    is_doubtful: bool = False
    is_layer: bool = False

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def keys(self) -> frozenset[Key]:
        return frozenset(key for instance in self.instances for key in instance)

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for rank, _ in self.keys)


class Beginnings:
    """Records which parameters had the same values on ranks when they were first compared.

    Parts of a layer usually begin with different values. If they begin alike, as biases of zeros do, they look like
    copies of one parameter whose gradients should have been added up but were not. Exceptions are constants in a layer
    with other parameters that began with different values, and equal constants in different pipeline stages. A
    parameter that a layer uses next after reducing its results over ranks is a copy, as the bias of a row-parallel
    layer.

    Values that are not constant are seldom equal by chance. If only some ranks began with the same ones, these ranks
    hold replicas of one part, such as an expert, and other ranks hold other parts. So do the constants in its layer.
    """

    def __init__(self) -> None:
        self._alike: dict[Family, bool] = {}
        self._constant: set[Kind] = set()
        self._beginnings: dict[Instance, int] = {}
        self._layers: dict[Instance, int] = {}
        self.parts: dict[Kind, Sequence[Collection[int]]] = {}
        """Parameters that are the same on several ranks, but have right gradients only as separate parts, each with the
        ranks of every part."""
        self.after_reductions: set[str] = set()
        """Names of the parameters that a module uses next after a reduction."""
        self.on_rows: set[str] = set()
        """Names of the parameters that every rank applies to its own rows of one matrix, and that are copies thus."""
        self.uses: Sequence[Sequence[Sequence[str]]] = []
        """For each rank, the parameters in the order in which its forward uses them, with the first operators."""
        self.successive: set[frozenset[int]] = set()
        """Pairs of ranks that hold pipeline stages of which one follows the other."""

    def note(self, family: Family, *, alike: bool) -> None:
        """Note whether all parameters of a family began alike."""
        self._alike[family] = alike

    def note_kind(self, family: Family, instances: Sequence[Instance], *, constant: bool) -> None:
        """Note that these instances of a family, and no others, began with the same values."""
        self._beginnings.update(dict.fromkeys(instances, 0 if self._alike[family] else 1 + len(self._beginnings)))
        if constant:
            self._constant.update(self.kind(family, one) for one in instances)

    def follow_layers(self) -> None:
        """Tell constants apart as another parameter of their layer, if that began with different values on ranks.

        The bias of a column-parallel layer is then copied among the ranks that hold copies of the weight.
        """
        constants: dict[Family, list[Instance]] = {}
        for one in self._beginnings:
            family = one[0], one[1], len(one[2])
            if self._alike.get(family) and self._is_a_part(self.kind(family, one)):
                constants.setdefault(family, []).append(one)
        for (name, *_), own in constants.items():
            layers: dict[Family, dict[tuple[int, ...], int]] = {}
            for (other, shape, ranks), number in self._beginnings.items():
                if number and other.rpartition(".")[0] == name.rpartition(".")[0]:
                    layers.setdefault((other, shape, len(ranks)), {})[ranks] = number
            known = next((of for of in layers.values() if all(one[2] in of for one in own)), {})
            self._layers.update({one: known[one[2]] for one in own if known})

    def knows(self, family: Family) -> bool:
        """Return whether it was noted how a family began."""
        return family in self._alike

    def kind(self, family: Family, instance: Instance) -> Kind:
        """Return the kind of an instance."""
        of_layer = 0 if family[0] in self.after_reductions else self._layers.get(instance, 0)
        return Kind(*family, of_layer or self._beginnings.get(instance, 0))

    def began_alike(self, kind: Kind) -> bool:
        """Return whether all ranks began with the same values of a parameter."""
        return self._alike[kind.family]

    def may_be_copies(self, kind: Kind) -> bool:
        """Return whether different instances of a parameter may be meant as copies of one."""
        if self.began_alike(kind) and not kind.beginning:
            return not self._is_a_part(kind)
        return kind.beginning > 0 and kind not in self._constant

    def _is_a_part(self, kind: Kind) -> bool:
        """Return whether a parameter began constant, in a layer whose other parameters began differently on ranks."""
        layer = kind.name.rpartition(".")[0]
        apart = any(not alike and name.rpartition(".")[0] == layer for (name, *_), alike in self._alike.items())
        return apart and kind in self._constant and kind.name not in self.after_reductions


def largest_rounding(unit: float) -> float:
    """Return the largest distance of copies at this unit roundoff, relative to their length."""
    return unit * (ROUNDINGS if unit < COARSE else ROUNDINGS_16_BIT)


def are_near(ours: Sequence[float], theirs: Sequence[float], most: float) -> bool:
    """Return whether two projections differ by at most ``most``, relative to the longer one."""
    if len(ours) != len(theirs):
        return False
    apart = sum((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))
    size = max(sum(a * a for a in ours), sum(b * b for b in theirs))
    return apart <= most**2 * size


def grouped(held: Sequence[Sequence[Facts]], unit: float, beginnings: Beginnings) -> list[Group]:
    """Return the parameters of a model from the ranks' descriptions; the result is the same on all ranks.

    ``unit`` is the unit roundoff of the training.
    """
    most = largest_rounding(unit)
    instances: dict[Instance, list[Key]] = {}
    for rank, own in enumerate(held):
        for number in range(len(own)):
            instances.setdefault(_instance(held, (rank, number)), []).append((rank, number))
    families: dict[Family, list[list[list[Key]]]] = {}
    for instance, keys in instances.items():
        name, shape, _ = instance
        family = name, shape, len(keys)
        found = families.setdefault(family, [])
        parts = beginnings.parts.get(beginnings.kind(family, instance))
        like = (one for one in found if _same(held, one[0], keys, ("weights", "gradient"), most))
        of = next((one for one in like if parts is None or _are_in_one(parts, one[0], keys)), None)
        if of is None:
            found.append([keys])
        else:
            of.append(keys)
    _join_tied(held, families, most)
    for family, found in families.items():
        if not beginnings.knows(family):
            _note_beginning(held, family, found, beginnings, most)
    beginnings.follow_layers()
    kinds = [
        (beginnings.kind(family, _instance(held, copies[0][0])), copies)
        for family, found in families.items()
        for copies in found
    ]
    held_by = [(kind, {rank for instance in copies for rank, _ in instance}) for kind, copies in kinds]
    joined = {
        (kind.name, rank) for kind, ranks in held_by for one in beginnings.successive if one <= ranks for rank in ranks
    }
    groups = []
    for (kind, copies), (_, holders) in zip(kinds, held_by, strict=True):
        size = max(held[rank][number]["size"] for rank, number in copies[0]) or 1.0
        others = [other for same, other in held_by if same == kind and other is not holders]
        may_be_copies = bool(others) and beginnings.may_be_copies(kind)
        are_layers = may_be_copies and all(_are_layers(beginnings, joined, holders, other) for other in others)
        groups.append(Group(kind, tuple(map(tuple, copies)), size, may_be_copies and not are_layers, are_layers))
    return groups


def _are_layers(
    beginnings: Beginnings, joined: Collection[tuple[str, int]], ours: Collection[int], theirs: Collection[int]
) -> bool:
    """Return whether parameters with this name on these ranks are of different layers, although they began alike.

    Two stages that follow each other have been built with the same seed if their forwards use all of their parameters
    alike, but for those with one gradient, in ``joined``. A single tied weight is used at different places.
    """
    uses = [[tuple(one) for one in own if (one[0], rank) not in joined] for rank, own in enumerate(beginnings.uses)]
    return all(frozenset((a, b)) in beginnings.successive and uses[a] == uses[b] for a in ours for b in theirs)


def _are_in_one(sets: Sequence[Collection[int]], ours: Sequence[Key], theirs: Sequence[Key]) -> bool:
    """Return whether the ranks that hold two parameters are in one of these sets."""
    return any(all(rank in one for rank, _ in (*ours, *theirs)) for one in sets)


def _instance(held: Sequence[Sequence[Facts]], key: Key) -> Instance:
    rank, number = key
    one = held[rank][number]
    return one["name"], tuple(one["shape"]), tuple(one["ranks"])


def _note_beginning(
    held: Sequence[Sequence[Facts]],
    family: Family,
    found: Sequence[list[list[Key]]],
    beginnings: Beginnings,
    most: float,
) -> None:
    """Note which parameters of a family begin alike: all of them, or some in the same pipeline stage."""
    alike = all(_may_be_one(held, found[0][0], one[0], most) for one in found)
    beginnings.note(family, alike=alike)
    kinds: list[list[list[Key]]] = []
    for copies in found:
        like = (one for one in kinds if alike or _begin_alike(held, one[0], copies[0], most))
        if (same := next(like, None)) is None:
            kinds.append(list(copies))
        else:
            same += copies
    for keys in kinds:
        rank, number = keys[0][0]
        instances = [_instance(held, one[0]) for one in keys]
        beginnings.note_kind(family, instances, constant=held[rank][number]["constant"])


def _join_tied(held: Sequence[Sequence[Facts]], families: dict[Family, list[list[list[Key]]]], most: float) -> None:
    """Join parameters of different names in different stages that have the same values and gradients.

    Tied weights whose gradients are added up are copies of this kind.
    """
    joined: list[list[list[Key]]] = []
    for (_, shape, size), found in families.items():
        for copies in list(found):
            for others in joined:
                (rank, number), (other_rank, other) = copies[0][0], others[0][0]
                one, another = held[rank][number], held[other_rank][other]
                if one["name"] == another["name"] or one["stage"] == another["stage"]:
                    continue
                if (
                    shape == tuple(another["shape"])
                    and size == len(others[0])
                    and _same(held, copies[0], others[0], ("weights",), most)
                    and _have_same_gradient(held, copies[0], others[0], most)
                ):
                    others += copies
                    found.remove(copies)
                    break
            else:
                joined.append(copies)
    for family in [family for family, found in families.items() if not found]:
        del families[family]


def _have_same_gradient(
    held: Sequence[Sequence[Facts]], ours: Sequence[Key], theirs: Sequence[Key], most: float
) -> bool:
    """Return whether two parameters have the same nonzero gradient, however ranks hold their pieces."""
    if any("pieces" in held[rank][number] for rank, number in (*ours, *theirs)):
        one, other = ([_added([held[a][i]["gradient"] for a, i in keys])] for keys in (ours, theirs))
    else:
        one, other = ([held[a][i]["gradient"] for a, i in keys] for keys in (ours, theirs))
    return any(map(any, one)) and all(are_near(a, b, most) for a, b in zip(one, other, strict=True))


def _added(projections: Sequence[Sequence[float]]) -> list[float]:
    return [sum(entries) for entries in zip(*(one for one in projections if one), strict=True)]


def tied_apart(held: Sequence[Sequence[Facts]], groups: Sequence[Group], unit: float) -> list[list[Key]]:
    """Return pairs of parameters that were tied when the model was built, but get different gradients in their stages.

    Their values are still equal.
    """
    tied = [one for one in groups if all(held[rank][number]["tied"] for rank, number in one.keys)]
    return list(_alike_in_stages(held, tied, unit))


def perhaps_tied(held: Sequence[Sequence[Facts]], groups: Sequence[Group], unit: float) -> list[list[Key]]:
    """Return pairs of parameters of different names that look tied, but get different gradients in their stages.

    Stages that are built with the same seed also have equal parameters, at the same positions.
    """
    equal: dict[tuple[object, ...], list[Group]] = {}
    for one in groups:
        rank, number = one.instances[0][0]
        if not held[rank][number]["constant"]:
            equal.setdefault((one.kind.shape, one.kind.size, *held[rank][number]["weights"]), []).append(one)
    random = [[number for number, one in enumerate(own) if not one["constant"]] for own in held]
    return [
        [(rank, number), (other_rank, other)]
        for alike in equal.values()
        for (rank, number), (other_rank, other) in _alike_in_stages(held, alike, unit)
        if held[rank][number]["name"] != held[other_rank][other]["name"]
        and random[rank].index(number) != random[other_rank].index(other)
        and not (held[rank][number]["tied"] and held[other_rank][other]["tied"])
    ]


def _alike_in_stages(held: Sequence[Sequence[Facts]], groups: Sequence[Group], unit: float) -> Iterator[list[Key]]:
    """Yield pairs of parameters that have equal values and different gradients, each in its own stage."""
    for one, other in combinations(groups, 2):
        ours, theirs = one.instances[0], other.instances[0]
        stages = {held[rank][number]["stage"] for (rank, number) in (ours[0], theirs[0])}
        if one.kind.family[1:] != other.kind.family[1:] or len(stages) == 1:
            continue
        equal = [_same(held, ours, theirs, (what,), largest_rounding(unit)) for what in ("weights", "gradient")]
        if equal == [True, False]:
            yield [ours[0], theirs[0]]


_ENDS = ("receives activations", " sends activations")
"""Descriptions of the last and the first pipeline stage if stages have no numbers."""


def replicas_of_stages(
    held: Sequence[Sequence[Facts]], groups: Sequence[Group], doubtful: Sequence[int], unit: float, *, is_first: bool
) -> list[int]:
    """Return the ``doubtful`` parameters of stages that several ranks hold, each with its own gradient.

    Return none if all of them have the same values again after their first step.
    """
    kinds: dict[Kind, list[int]] = {}
    for index in doubtful:
        kinds.setdefault(groups[index].kind, []).append(index)
    found: list[int] = []
    are_equal = not is_first
    for indices in kinds.values():
        keys = [groups[index].instances[0] for index in indices]
        stages = {held[rank][number]["stage"] for index in indices for rank, number in groups[index].keys}
        stage = stages.pop()
        if stages or len(indices) < 2 or not (stage.isdigit() or stage in _ENDS):
            continue
        are_equal &= all(_same(held, keys[0], one, ("weights",), largest_rounding(unit)) for one in keys[1:])
        found += indices
    return [] if are_equal else found


def have_one_gradient(
    held: Sequence[Sequence[Facts]], groups: Sequence[Group], index: int, unit: float, beginnings: Beginnings
) -> bool:
    """Return whether the parts of a DTensor, or some parts with different weights, have the same gradient."""
    group, most = groups[index], largest_rounding(unit)
    every = [held[rank][number] for rank, number in group.keys]
    are_parts = any(one["copies"] < len(one["ranks"]) and "pieces" not in one for one in every)
    if not are_parts and beginnings.began_alike(group.kind):
        kinds = {beginnings.kind(group.kind.family, _instance(held, one[0])) for one in group.instances}
        return len(kinds) > 1 or (len(group.instances) > 1 and not beginnings.may_be_copies(group.kind))
    if are_parts:
        first, *others = ([key] for key in group.instances[0])
        return bool(others) and all(_same(held, first, other, ("gradient",), most) for other in others)
    own = group.instances[0]
    return any(
        _same(held, own, other.instances[0], ("gradient",), most)
        and not _same(held, own, other.instances[0], ("weights",), most)
        and any(any(held[rank][number]["gradient"]) for rank, number in own)
        for other in groups
        if other is not group and other.kind.family == group.kind.family
    )


def _begin_alike(held: Sequence[Sequence[Facts]], ours: Sequence[Key], theirs: Sequence[Key], most: float) -> bool:
    """Return whether two parameters of the same pipeline stage began alike."""
    (rank, number), (other_rank, other) = ours[0], theirs[0]
    return held[rank][number]["stage"] == held[other_rank][other]["stage"] and _same(
        held, ours, theirs, ("weights",), most
    )


def _may_be_one(held: Sequence[Sequence[Facts]], ours: Sequence[Key], theirs: Sequence[Key], most: float) -> bool:
    """Return whether two parameters began alike. Equal constants in different stages do not count."""
    if not _same(held, ours, theirs, ("weights",), most):
        return False
    (rank, number), (other_rank, other) = ours[0], theirs[0]
    one, another = held[rank][number], held[other_rank][other]
    return one["stage"] == another["stage"] or not one["constant"]


def _same(
    held: Sequence[Sequence[Facts]], ours: Sequence[Key], theirs: Sequence[Key], what: Sequence[str], most: float
) -> bool:
    return all(
        are_near(held[a][i][kind], held[b][j][kind], most)
        for (a, i), (b, j) in zip(ours, theirs, strict=True)
        for kind in what
    )
