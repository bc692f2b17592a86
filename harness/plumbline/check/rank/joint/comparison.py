"""Compares the gradients that optimizers receive with central differences of the joint forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from plumbline.check.rank.joint.copies_and_parts import (
    Beginnings,
    Group,
    Kind,
    grouped,
    have_one_gradient,
    replicas_of_stages,
    tied_apart,
)
from plumbline.check.rank.joint.forward import JointForward, RecordedCall, unit_of
from plumbline.check.rank.joint.stages import changed_on_the_way, passed_on
from plumbline.check.rank.joint.weights import JointParameter, JointWeights, leaves_of, product
from plumbline.check.rank.store_exchange import AbsentRankError, Exchange, NoAgreementError
from plumbline.recording.observer import Facts
from plumbline.replay.derivatives import InPlace
from plumbline.replay.function_derivatives import can_be_a_derivative
from plumbline.replay.precision import ReplayPrecision

STEP = 1e-7
"""How far weights are moved, in multiples of their size: float64 keeps nine digits of the difference, and few units of
a piecewise linear layer change sides."""

LIMIT = 2.0**7
"""How many times as large as the noise a right error may be: the square root of 16,384 terms of a sum. Its roundings
grow with the square root of their number (Higham, Accuracy and Stability of Numerical Algorithms, 2.8), and
``Rounding`` has only one for the whole of an operator."""

LIMIT_16_BIT = 2.0**4
"""The same in 16-bit formats: operators sum in float32 there, and round only their results. Noise is known from the few
numbers that ranks and passes add: four deviations, of a deviation that may be four times as large."""

COARSE = 2.0**-12
"""The unit roundoff from which on a format counts as one of 16 bits: that of float16 is 2⁻¹¹."""

SPREAD = 4.0
"""By how many roundings the outputs of an ordinary forward differ from exact ones."""

ROUNDS = 16
"""Directions after which parameters with small gradients are left out. Each shows those whose gradients are above the
noise of all that are left: few at a time in 16-bit formats."""

MOST_HALVES = 48
"""Comparisons by which single parameters are found, where a direction through all of them is wrong."""


MOST_OWN = 4
"""Parameters of which it is asked whether their copies have effects on the same ranks."""


@dataclass(frozen=True)
class Reading:
    """What the gradients are those of: the sum of the ranks' losses, or the mean; and what collectives in place add."""

    is_sum: bool = False
    in_place: InPlace = InPlace.DERIVED


@dataclass(frozen=True)
class Difference:
    """The derivative of S along a direction, and what was received for each parameter.

    ``shares`` are its terms by rank and pass, ``right`` is their sum; ``limit`` is the largest right error. ``left`` is
    what the step before left in the gradients.
    """

    shares: list[list[float]]
    right: float
    noise: float
    limit: float
    received: Mapping[int, float]
    left: Mapping[int, float]

    def error(self, groups: Iterable[int]) -> float:
        """Return how far what was received for these groups together is from what is right."""
        return abs(sum(self.received[one] for one in groups) - self.right)


class JointComparison:
    """Compares the gradients of one process's optimizers together with all other ranks.

    After a rank did not come, or failed on its own, nothing is compared any more: ``obstacle`` says why. Nor after a
    step whose gradients were wrong. The first step with gradients that show it decides on the reading.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._beginnings = Beginnings()
        self._left: dict[int, Tensor | None] = {}
        self._reading: Reading | None = None
        self.obstacle = ""

    def forget(self) -> None:
        """Let go of gradients."""
        self._left = {}

    def compare(
        self,
        calls: Sequence[RecordedCall],
        held: Sequence[JointParameter],
        losses: Sequence[float],
        divisors: Collection[float] = (),
    ) -> Facts:
        """Return what came of comparing the gradients that ``held`` parameters have now, the same on all ranks.

        ``losses`` are the values at which this rank's backward passes began, if they began at a loss. All ranks have to
        call this at the same step. ``divisors``: by what the script has gradients divided, as multiples of the number
        of ranks that reduce them.
        """
        if self.obstacle:
            return {"why": self.obstacle}
        try:
            try:
                comparison = _Comparison(
                    self._exchange, self._beginnings, calls, held, self._left, self._reading, losses, divisors
                )
                found, self._reading = comparison.facts(), comparison.known
                if found["wrong"]:
                    self.obstacle = "gradients of an earlier step were wrong"
            except NoAgreementError as error:
                found = {"why": str(error)}
            self._left = {id(one.parameter): one.received() for one in held}
            return found
        except AbsentRankError as error:
            self.obstacle = str(error)
        except Exception as error:  # on this rank alone, perhaps: the others wait for it no longer than once
            self.obstacle = f"recomputing the forward on all ranks failed: {type(error).__name__}: {error}"
        return {"why": self.obstacle}


class _Comparison:
    def __init__(
        self,
        exchange: Exchange,
        beginnings: Beginnings,
        calls: Sequence[RecordedCall],
        held: Sequence[JointParameter],
        left: Mapping[int, Tensor | None],
        known: Reading | None,
        losses: Sequence[float],
        divisors: Collection[float],
    ) -> None:
        self._exchange = exchange
        self._rank = torch.distributed.get_rank()
        self._beginnings = beginnings
        self._held = held
        self._left = left
        self.known = known
        collectives: dict[str, list[int]] = {}
        for one in calls:
            for group, count in one.call.collectives.items():
                collectives.setdefault(group, []).append(count)
        self._agree(collectives)
        self._gradients = [one.gradient() for one in held]
        ours = {
            "held": [one.described(gradient) for one, gradient in zip(held, self._gradients, strict=True)],
            "losses": list(losses),
            "unit": unit_of(calls),
            "divisors": list(divisors),
            "communicates": any(map(any, collectives.values())),
            "finite": all(one is None or bool(one.isfinite().all()) for one in self._gradients),
        }
        theirs = exchange.values(ours)
        if not all(one["finite"] for one in theirs):
            raise NoAgreementError("gradients were not finite")
        self._losses = sum(bool(one["losses"]) for one in theirs) or len(theirs)
        losses_alike = bool(losses) and all(one["losses"] == theirs[0]["losses"] for one in theirs)
        requested = {divisor for one in theirs for divisor in one["divisors"]}
        self._mean_of = self._losses * (requested.pop() if len(requested) == 1 else 1.0)
        self._of = self._mean_of
        self._unit = max(one["unit"] for one in theirs)
        self._every = [one["held"] for one in theirs]
        self._communicate = [one["communicates"] for one in theirs]
        self.groups = grouped(self._every, self._unit, beginnings)
        self.changed = changed_on_the_way(exchange.values(passed_on(calls)), self._unit)
        gathered = leaves_of(one.call.module for one in calls)
        self._weights = JointWeights(ReplayPrecision.FLOAT64, held, gathered)
        self._forward = JointForward(calls, self._weights)
        self._parts: set[int] = set()
        self._still = self._all(lambda: self._forward.rehearse(JointWeights(ReplayPrecision.NATIVE, held, gathered)))
        # A loss that is summed over ranks only to be printed has one value as well.
        self._one_loss = losses_alike and all(
            len(own) == len(self._still[0]) and all(map(_are_near, own, self._still[0])) for own in self._still
        )
        measured = exchange.values([self._forward.magnitude, self._forward.spread, self._forward.changes_in_place])
        self._magnitude = sum(magnitude for magnitude, *_ in measured)
        # A forward may compute in a coarser format than its parameters and outputs show.
        self._unit = max([self._unit, *(spread / SPREAD for _, spread, _ in measured)])
        self._in_place = [*InPlace] if any(changes for *_, changes in measured) else [InPlace.DERIVED]
        self._limit = LIMIT if self._unit < COARSE else LIMIT_16_BIT
        self._all(lambda: self._forward.rehearse_roughly(self._unit))

    def _agree(self, collectives: Mapping[str, list[int]]) -> None:
        """Make sure that the members of each process group used it as often in each of their calls."""
        groups: Any = torch.distributed.distributed_c10d._world
        members = {
            str(groups.pg_names[one]): sorted(ranks)
            for one, ranks in groups.pg_group_ranks.items()
            if one in groups.pg_names
        }
        counts = {name: [members[name], [one for one in given if one]] for name, given in collectives.items()}
        everywhere = self._exchange.values(counts)
        for own in everywhere:
            for name, (ranks, given) in own.items():
                if any(everywhere[rank].get(name, [ranks, []]) != [ranks, given] for rank in ranks if given):
                    raise NoAgreementError("ranks called different numbers of collectives in the forward")

    def _all(self, compute: Callable[[], list[Any]]) -> list[list[Any]]:
        """Compute together, and return what each rank has; all ranks give up where one of them failed."""
        try:
            own: tuple[list[Any], str] = compute(), ""
        except Exception as error:
            own = [], str(error) if isinstance(error, NoAgreementError) else f"{type(error).__name__}: {error}"
        found = self._exchange.values(own)
        if failed := next((why for _, why in found if why), None):
            raise NoAgreementError(failed)
        return [terms for terms, _ in found]

    def facts(self) -> Facts:
        """Compare the gradients of all parameters, in few directions."""
        remaining = [place for place, one in enumerate(self.groups)]
        judged: list[int] = []
        found: Facts = {"noise": [], "wrong": [], "unsearched": [], "limit": self._limit, "losses": self._losses}
        right: list[Facts] = []
        found["right"] = right
        found["one_loss"] = self._one_loss
        found["changed"] = self.changed
        reading, difference = self._read(remaining)
        found["is_sum"], found["in_place"] = reading.is_sum, reading.in_place is not InPlace.DERIVED
        for number in range(ROUNDS):
            if number:
                difference = self._difference(remaining, f"{number}")
            if difference.error(remaining) > difference.limit:
                found["wrong"], searched, unsearched = self._apart(remaining, right)
                found["unsearched"] = self._named(unsearched)
                judged += searched
                found["not_derivatives"] = self._not_derivatives()
                break
            if difference.noise:
                found["noise"].append(difference.error(remaining) / difference.noise)
            right.append(_measured(difference, remaining))
            seen = [place for place in remaining if self._shows(difference, place)]
            judged += [place for place in seen if not self.groups[place].is_doubtful]
            remaining = [place for place in remaining if place not in seen]
            if not seen or not remaining:
                break
        doubtful = [place for place, one in enumerate(self.groups) if one.is_doubtful]
        found["alike"] = self._named(sorted(self._parts))
        found["judged"] = self._named(sorted(judged))
        found["doubtful"] = self._named(doubtful)
        found["norms"] = self._norms()
        own = [] if found["wrong"] else self._not_averaged(doubtful)
        found["own"] = self._named(own)
        found["tied_apart"] = [
            [[self._every[rank][number]["name"], rank] for rank, number in pair]
            for pair in tied_apart(self._every, self.groups, self._unit)
        ]
        return found

    def _not_averaged(self, doubtful: Sequence[int]) -> list[int]:
        """Return those that began alike on several ranks, and have effects on the terms of S of different ranks.

        They are replicas, each with samples of its own; parts of a layer share an effect. Stages of a pipeline are run
        apart, so their effects say nothing: there, ranks hold replicas if they hold the same stage and communicate with
        nobody in its forward. Whoever makes their weights equal after a step may average these.
        """
        if self._losses < len(self._still):
            silent = [
                place for place in doubtful if not any(self._communicate[one] for one in self.groups[place].ranks)
            ]
            return replicas_of_stages(self._every, self.groups, silent, self._unit, is_first=not self._left)
        kinds: dict[Kind, list[int]] = {}
        for place in doubtful:
            kinds.setdefault(self.groups[place].kind, []).append(place)
        found: list[int] = []
        for places in list(kinds.values())[:MOST_OWN]:
            differences = [self._difference([place], f"own {place}") for place in places]
            reached = [
                {rank for rank, own in enumerate(one.shares) if any(abs(share) > one.limit for share in own)}
                for one in differences
            ]
            shown = all(self._shows(one, place) for one, place in zip(differences, places, strict=True))
            if shown and all(reached) and sum(map(len, reached)) == len(set().union(*reached)):
                found += places
        return found

    def _norms(self) -> list[float]:
        """Return the smallest and the largest norm of all gradients: some may be copies of others, or parts."""
        squares = [
            [sum(self._every[rank][number]["square"] for rank, number in instance) for instance in group.instances]
            for group in self.groups
        ]
        seen: dict[Kind, float] = {}
        parts = 0.0
        for place, (group, own) in enumerate(zip(self.groups, squares, strict=True)):
            parts += sum(own) if place in self._parts else own[0]
            key = group.kind if group.is_doubtful else (f"{place}", (), 0)
            seen[key] = min(own[0], seen.get(key, math.inf))
        return [math.sqrt(sum(seen.values())), math.sqrt(parts)]

    def _not_derivatives(self) -> list[str]:
        """Return the names of functions that communicate, and whose backward is the derivative of no forward."""
        self._weights.move({}, 0.0)
        every = self._all(self._forward.exchanges)
        names = [[name for name, _ in own] for own in every]
        if any(own != names[0] for own in names):
            return []
        wrong = [
            name for place, name in enumerate(names[0]) if not can_be_a_derivative([own[place][1] for own in every])
        ]
        return list(dict.fromkeys(wrong))

    def _read(self, places: Sequence[int]) -> tuple[Reading, Difference]:
        """Return the reading by which all gradients are right, the first one if none is, and its difference."""
        sums = (False, True) if self._losses > 1 else (False,)
        readings = [self.known] if self.known else [Reading(each, one) for one in self._in_place for each in sums]
        for one in readings:
            difference = self._by(one, places)
            if difference.error(places) <= difference.limit:
                if abs(difference.right) > 2 * difference.limit:
                    self.known = one
                return one, difference
        return readings[0], self._by(readings[0], places)

    def _by(self, reading: Reading, places: Sequence[int]) -> Difference:
        self._of = 1.0 if reading.is_sum else self._mean_of
        self._forward.take(reading.in_place)
        return self._difference(places, "0")

    def _shows(self, difference: Difference, place: int) -> bool:
        """Return whether an error as large as the gradient of a parameter would have been seen."""
        return abs(difference.received[place]) > 2 * difference.limit

    def _named(self, places: Iterable[int]) -> list[list[object]]:
        """Return the names of parameters, each with the ranks that hold it by this name."""
        named: list[list[object]] = []
        for place in places:
            ranks: dict[str, list[int]] = {}
            for rank, number in sorted(self.groups[place].keys):
                ranks.setdefault(self._every[rank][number]["name"], []).append(rank)
            named += [[name, each] for name, each in ranks.items()]
        return named

    def _apart(self, places: Sequence[int], right: list[Facts]) -> tuple[list[Facts], list[int], list[int]]:
        """Return what is wrong about single parameters, found by halving; which were judged; and which not reached.

        What was measured of those that are right is added to ``right``.
        """
        wrong, judged, suspects, budget = [], [], [list(places)], MOST_HALVES
        unresolved: dict[int, tuple[int, Difference]] = {}
        while suspects and budget > 0:
            half = suspects.pop()  # the latest: to reach single parameters before the comparisons are used up
            middle = len(half) // 2
            for part in [half[:middle], half[middle:]] if middle else [half]:
                budget -= 1
                difference = self._difference(part, f"apart {part[0]} {len(part)}")
                if difference.error(part) <= difference.limit:
                    right.append(_measured(difference, part))
                    shown = [place for place in part if self._shows(difference, place)]
                    judged += [place for place in shown if not self.groups[place].is_doubtful]
                elif len(part) > 1:
                    suspects.append(part)
                    unresolved[len(part)] = part[0], difference
                elif self._is_a_part(part[0]):
                    self._parts.add(part[0])
                    self._beginnings.parts.add(self.groups[part[0]].kind)
                else:
                    again = self._difference(part, f"again {part[0]}")
                    wrong.append(self._wrong(part[0], difference, again))
                    judged.append(part[0])
        if suspects and not wrong and not self._parts:
            wrong.append(self._wrong(*unresolved[min(unresolved)]))
        return wrong, judged, [place for half in suspects for place in half]

    def _is_a_part(self, place: int) -> bool:
        """Return whether the gradient is right if each rank's copy is a part of its own, alike as they are."""
        group = self.groups[place]
        if len(group.instances) == 1:
            return False
        first = Group(group.kind, group.instances[:1], group.size)
        difference = self._difference([place], f"one {place}", {place: first})
        return difference.error([place]) <= difference.limit

    def _wrong(self, place: int, difference: Difference, again: Difference | None = None) -> Facts:
        """Return what is wrong; ``again`` is another direction, which shows whether there is a common factor."""
        group = self.groups[place]
        others = [] if again is None else [[again.received[place], again.right, again.noise]]
        return {
            **_measured(difference, [place]),
            "name": group.name,
            "ranks": group.ranks,
            "right": difference.right,
            "again": others,
            "began_alike": group.is_doubtful,
            "copies": sum(one.kind == group.kind for one in self.groups),
            "one_gradient": have_one_gradient(self._every, self.groups, place, self._unit, self._beginnings),
        }

    def _difference(self, places: Sequence[int], seed: str, instead: Mapping[int, Group] | None = None) -> Difference:
        """Return the derivative of S along a direction through some of the parameters."""
        groups = {place: (instead or {}).get(place, self.groups[place]) for place in places}
        directions: dict[int, Tensor] = {}
        products: dict[int, tuple[float, float, float]] = {}
        for place, group in groups.items():
            for rank, number in group.keys:
                if rank == self._rank:
                    one = self._held[number]
                    along = one.direction(f"{seed} {place}", group.size)
                    directions[id(one.parameter)] = along
                    if (rank, number) in group.instances[0]:
                        left, _ = product(self._left.get(id(one.parameter)), along, one.copies)
                        products[place] = *product(self._gradients[number], along, one.copies), left
        forth, back = (self._at(directions, sign) for sign in (STEP, -STEP))
        rough_forth, rough_back = (self._at(directions, sign, self._unit) for sign in (STEP, -STEP))
        shares = _combined(forth, back, lambda a, b: (a - b) / (2 * STEP * self._of))
        rough = _combined(rough_forth, rough_back, lambda a, b: (a - b) / (2 * STEP * self._of))
        bends = [
            (a + b - 2 * c) / (2 * STEP * self._of)
            for one, other, still in zip(forth, back, self._still, strict=True)
            for a, b, c in zip(one, other, still, strict=True)
        ]
        every = self._exchange.values({str(place): value for place, value in products.items()})
        received, left_over = (
            {place: sum(own[str(place)][kind] for own in every if str(place) in own) for place in places}
            for kind in (0, 2)
        )
        squares = sum(value[1] for own in every for value in own.values())
        rounded = [a - b for one, other in zip(shares, rough, strict=True) for a, b in zip(one, other, strict=True)]
        cancelled = 2.0**-52 * self._magnitude / (STEP * self._of)
        differences = 4 * math.hypot(*bends) / self._limit
        noise = math.hypot(self._unit * math.sqrt(squares), *rounded, differences, cancelled)
        if not math.isfinite(noise):
            raise NoAgreementError("the recomputed forward is not finite")
        return Difference(shares, math.fsum(map(math.fsum, shares)), noise, self._limit * noise, received, left_over)

    def _at(self, directions: Mapping[int, Tensor], length: float, unit: float | None = None) -> list[list[float]]:
        def compute() -> list[float]:
            self._weights.move(directions, length)
            return self._forward.terms(unit)

        return self._all(compute)


def _measured(difference: Difference, places: Iterable[int]) -> Facts:
    """Return what was received for these parameters together, and what may explain it."""
    return {
        "received": sum(difference.received[place] for place in places),
        "left": sum(difference.left[place] for place in places),
        "shares": difference.shares,
        "noise": difference.noise,
    }


def _are_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)


def _combined(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], combine: Callable[[float, float], float]
) -> list[list[float]]:
    return [[combine(a, b) for a, b in zip(one, other, strict=True)] for one, other in zip(ours, theirs, strict=True)]
