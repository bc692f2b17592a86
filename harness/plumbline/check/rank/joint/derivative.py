"""The derivative of the joint forward along directions through some parameters, and what was received for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from plumbline.check.rank.joint.copies_and_parts import COARSE, Beginnings, Group, Key, grouped
from plumbline.check.rank.joint.forward import JointForward, RecordedCall, unit_of
from plumbline.check.rank.joint.holders import note_holders
from plumbline.check.rank.joint.meetings import Meetings, told
from plumbline.check.rank.joint.reductions import used_after_reductions
from plumbline.check.rank.joint.stages import changed_on_the_way, passed_on
from plumbline.check.rank.joint.weights import JointParameter, JointWeights, has_memory_for, leaves_of, product
from plumbline.check.rank.store_exchange import Exchange, NoAgreementError
from plumbline.replay.collectives import members_of_groups
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

SAME_FACTOR = 1e-6
"""Relative difference up to which the factors that ranks read off the lengths of their gradients are one."""

OTHER_TENSORS = (
    "the forward communicates, and no optimizer holds the parameters of its modules. Gradients of other tensors, such "
    "as hand-written shards, are judged only if each rank can compute its own"
)

SPREAD = 4.0
"""By how many roundings the outputs of an ordinary forward differ from exact ones."""


@dataclass(frozen=True)
class Reading:
    """What the gradients are those of: the sum of the ranks' losses, or the mean; and what collectives in place add.

    ``derives``: what other collectives return without a gradient depends on the tensors of all ranks; otherwise, it is
    a constant.
    ``factor`` is in all of them, as where a trainer's own code has divided gradients by a loss scale, or clipped them.
    ``factor_error`` is the noise of the factor, relative to it. ``is_by_hand``: the script was seen to multiply all
    gradients by it.
    """

    is_sum: bool = False
    in_place: InPlace = InPlace.DERIVED
    derives: bool = False
    factor: float = 1.0
    factor_error: float = 0.0
    is_by_hand: bool = False


@dataclass(frozen=True)
class RankLosses:
    """The values at which a rank's backward passes began, if they began at a loss.

    ``are_computed_together``: a function that communicates has computed them from the outputs of modules.
    """

    values: Sequence[float]
    are_computed_together: bool = False


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
        return abs(self.received_for(groups) - self.right)

    def received_for(self, groups: Iterable[int]) -> float:
        """Return what was received for these groups together."""
        return sum(self.received[one] for one in groups)


class JointDerivative:
    """Differentiates the forward of one step, together with all other ranks, and knows the gradients received.

    ``every`` has what each rank says of its parameters, and ``groups`` which of these belong together. ``losses``
    counts the ranks that compute a loss. ``has_same_loss``: all of their losses are equal. ``has_one_loss``: they are
    computed from equal outputs. ``communicate`` says of each rank whether its forward does. ``receives_constants``: the
    forward uses what collectives return as constants, for tensors with a gradient. ``changed`` are gradients that were
    changed between stages. ``in_place`` are the readings of collectives in place that have to be tried. ``is_first``:
    no step was compared before. ``are_copies``: optimizers step copies of all parameters. ``squares`` has those of
    gradients that were taken, by rank and number. ``factor`` is that in all of them, and its relative error; None
    before any was compared. ``by_hand`` is that by which the script was seen to multiply them on every rank, 1 if there
    is none. ``step``: each step has directions of its own in 16-bit formats, where all of them are judged together.
    """

    def __init__(
        self,
        exchange: Exchange,
        meetings: Meetings,
        beginnings: Beginnings,
        calls: Sequence[RecordedCall],
        held: Sequence[JointParameter],
        left: Mapping[int, Tensor | None],
        losses: RankLosses,
        divisors: Collection[float],
        by_hand: float = 1.0,
        step: int = 0,
    ) -> None:
        self._exchange = exchange
        self._step = step
        self._meetings = meetings
        self._rank = torch.distributed.get_rank()
        self._left = left
        self.is_first = not left
        collectives: dict[str, list[int]] = {}
        for one in calls:
            for group, count in one.call.collectives.items():
                collectives.setdefault(group, []).append(count)
        self._agree(collectives)
        if not all(exchange.values(has_memory_for(held))):
            raise NoAgreementError("too little memory is free on a rank to recompute the forward on all ranks")
        ours = {
            "losses": list(losses.values),
            "together": losses.are_computed_together,
            "unit": unit_of(calls),
            "divisors": list(divisors),
            "by_hand": by_hand,
            "communicates": any(map(any, collectives.values())),
        }
        theirs = exchange.values(ours)
        self.losses = sum(bool(one["losses"]) for one in theirs) or len(theirs)
        self._losses = [one["losses"] for one in theirs]
        self._are_computed_together = any(one["together"] for one in theirs)
        self.has_same_loss = bool(losses.values) and all(own == self._losses[0] for own in self._losses)
        requested = {divisor for one in theirs for divisor in one["divisors"]}
        self._mean_of = self.losses * (requested.pop() if len(requested) == 1 else 1.0)
        self._of = self._mean_of
        self._reading = Reading()
        self.unit: float = max(one["unit"] for one in theirs)
        factors = [one["by_hand"] for one in theirs]
        is_one = all(math.isclose(one, factors[0], rel_tol=max(self.unit, SAME_FACTOR)) for one in factors)
        self.by_hand: float = factors[0] if is_one else 1.0
        self.communicate = [one["communicates"] for one in theirs]
        self._beginnings = beginnings
        self.squares: dict[Key, float] = {}
        self.factor: tuple[float, float] | None = None
        self.receive(held)
        self.changed = changed_on_the_way(exchange.values(passed_on(calls)), self.unit)
        gathered = leaves_of(one.call.module for one in calls)
        self._weights = JointWeights(ReplayPrecision.FLOAT64, held, gathered)
        self._forward = JointForward(calls, self._weights)
        with used_after_reductions(self._weights) as used:
            self._still = self._rehearsed(
                lambda: self._forward.rehearse(JointWeights(ReplayPrecision.NATIVE, held, gathered))
            )
        for names in exchange.values([one.name for one in held if id(one.parameter) in used]):
            beginnings.after_reductions.update(names)
        self.groups = grouped(self.every, self.unit, beginnings)
        # A loss that is summed over ranks only to be printed has one value as well.
        self.has_one_loss = self.has_same_loss and all(
            len(own) == len(self._still[0]) and all(map(_are_near, own, self._still[0])) for own in self._still
        )
        forward = self._forward
        found = (forward.magnitude, forward.spread, forward.changes_in_place, forward.receives_constants)
        measured = exchange.values(list(found))
        self._magnitude = sum(magnitude for magnitude, *_ in measured)
        # A forward may compute in a coarser format than its parameters and outputs show.
        self.unit = max([self.unit, *(spread / SPREAD for _, spread, *_ in measured)])
        self.in_place = [*InPlace] if any(changes for _, _, changes, _ in measured) else [InPlace.DERIVED]
        self.receives_constants = any(receives for *_, receives in measured)
        self.limit = LIMIT_16_BIT if self.is_coarse else LIMIT
        self._rehearsed(lambda: self._forward.rehearse_roughly(self.unit))

    @property
    def is_coarse(self) -> bool:
        """Whether the forward computes in 16 bits: errors are of one size there.

        In finer formats, few units that change sides make single large ones.
        """
        return self.unit >= COARSE

    def have_one_loss(self, ranks: Collection[int]) -> bool:
        """Return whether ranks compute one loss together, from outputs of which each has a part, as far as it shows."""
        first, *others = (self._losses[rank] for rank in ranks)
        near = max(self.unit, SAME_FACTOR)
        are_equal = all(
            len(own) == len(first) and all(math.isclose(a, b, rel_tol=near) for a, b in zip(own, first, strict=True))
            for own in others
        )
        return self._are_computed_together and bool(first) and are_equal

    def receive(self, held: Sequence[JointParameter]) -> None:
        """Take the gradients that these parameters have now; they are the same parameters as before."""
        self._held = held
        self._gradients = [one.gradient() for one in held]
        finite = all(one is None or bool(one.isfinite().all()) for one in self._gradients)
        described = [one.described(gradient) for one, gradient in zip(held, self._gradients, strict=True)]
        theirs = self._exchange.values({"held": described, "finite": finite})
        if not any(one["held"] for one in theirs):
            raise NoAgreementError(OTHER_TENSORS)
        if not all(one["finite"] for one in theirs):
            raise NoAgreementError("gradients were not finite")
        self.every = [one["held"] for one in theirs]
        note_holders(self.every, self.unit)
        self.are_copies = all("pieces" in one for own in self.every for one in own)
        self.groups = grouped(self.every, self.unit, self._beginnings)

    def take_complete(self) -> list[int]:
        """Return the places of parameters whose gradients are all here now, but for those that were taken before."""
        complete = [
            place
            for place, group in enumerate(self.groups)
            if all(self.every[rank][number]["complete"] for rank, number in group.keys)
        ]
        new = [place for place in complete if not self.groups[place].keys & self.squares.keys()]
        for rank, number in (key for place in new for key in self.groups[place].keys):
            self.squares[rank, number] = self.every[rank][number]["square"]
        return new

    @property
    def has_all(self) -> bool:
        """Whether the gradients of all parameters were taken."""
        return all(group.keys <= self.squares.keys() for group in self.groups)

    def _agree(self, collectives: Mapping[str, list[int]]) -> None:
        """Make sure that the members of each process group used it as often in each of their calls."""
        members = members_of_groups()
        counts = {name: [members[name], [one for one in given if one]] for name, given in collectives.items()}
        everywhere = self._exchange.values(counts)
        for own in everywhere:
            for name, (ranks, given) in own.items():
                if any(everywhere[rank].get(name, [ranks, []]) != [ranks, given] for rank in ranks if given):
                    raise NoAgreementError("ranks called different numbers of collectives in the forward")

    def _rehearsed(self, compute: Callable[[], list[Any]]) -> list[list[Any]]:
        """Compute together for the first time: what fails on one rank alone fails here. See ``_all``."""

        def met() -> list[Any]:
            with self._meetings.held():
                return compute()

        return self._all(met)

    def _all(self, compute: Callable[[], list[Any]]) -> list[list[Any]]:
        """Compute together, and return what each rank has; all ranks give up where one of them failed."""
        try:
            own: tuple[list[Any], str] = compute(), ""
        except Exception as error:
            own = [], told(error)
        found = self._exchange.values(own)
        if failed := next((why for _, why in found if why), None):
            raise NoAgreementError(failed)
        return [terms for terms, _ in found]

    def difference(
        self,
        places: Sequence[int],
        seed: str,
        instead: Mapping[int, Group] | None = None,
        *,
        part_of: Collection[int] | None = None,
    ) -> Difference:
        """Return the derivative of S along a direction through some of the parameters.

        ``part_of``: the direction goes only through the parts that these ranks hold.
        """
        groups = {place: (instead or {}).get(place, self.groups[place]) for place in places}
        of_step = f"{self._step} " if self.is_coarse else ""
        directions: dict[int, Tensor] = {}
        products: dict[int, tuple[float, float, float]] = {}
        for place, group in groups.items():
            for rank, number in group.keys:
                if rank == self._rank:
                    one = self._held[number]
                    along = one.direction(f"{of_step}{seed} {place}", group.size)
                    if part_of is not None:
                        along = one.own_part(along) if rank in part_of else torch.zeros_like(along)
                    directions[id(one.parameter)] = along
                    if (rank, number) in group.instances[0]:
                        copies = self.every[rank][number]["copies"]
                        left, _ = product(self._left.get(id(one.parameter)), along, copies)
                        products[place] = *product(self._gradients[number], along, copies), left
        forth, back = (self._at(directions, sign) for sign in (STEP, -STEP))
        rough_forth, rough_back = (self._at(directions, sign, self.unit) for sign in (STEP, -STEP))
        shares = _combined(forth, back, lambda a, b: (a - b) / (2 * STEP * self._of))
        rough = _combined(rough_forth, rough_back, lambda a, b: (a - b) / (2 * STEP * self._of))
        bends = [
            (a + b - 2 * c) / (2 * STEP * self._of)
            for one, other, still in zip(forth, back, self._still, strict=True)
            for a, b, c in zip(one, other, still, strict=True)
        ]
        every = self._exchange.values({str(place): value for place, value in products.items()})
        factor = self._reading.factor
        received, left_over = (
            {place: sum(own[str(place)][kind] for own in every if str(place) in own) / factor for place in places}
            for kind in (0, 2)
        )
        squares = sum(value[1] for own in every for value in own.values()) / factor**2
        rounded = [a - b for one, other in zip(shares, rough, strict=True) for a, b in zip(one, other, strict=True)]
        cancelled = 2.0**-52 * self._magnitude / (STEP * self._of)
        differences = 4 * math.hypot(*bends) / self.limit
        right = math.fsum(map(math.fsum, shares))
        of_factor = right * self._reading.factor_error
        noise = math.hypot(self.unit * math.sqrt(squares), *rounded, differences, cancelled, of_factor)
        if not math.isfinite(noise):
            raise NoAgreementError("the recomputed forward is not finite")
        return Difference(shares, right, noise, self.limit * noise, received, left_over)

    def _at(self, directions: Mapping[int, Tensor], length: float, unit: float | None = None) -> list[list[float]]:
        def compute() -> list[float]:
            self._weights.move(directions, length)
            return self._forward.terms(unit)

        return self._all(compute)

    def read_as(self, reading: Reading) -> None:
        """Take the gradients as those of what a reading says."""
        self._reading = reading
        self._of = 1.0 if reading.is_sum else self._mean_of
        self._forward.take(reading.in_place, derives=reading.derives)

    @property
    def divided_by(self) -> float:
        """By what the sum of the ranks' losses is divided: gradients are those of what that makes."""
        return self._of

    def not_derivatives(self) -> list[str]:
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


def _are_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)


def _combined(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], combine: Callable[[float, float], float]
) -> list[list[float]]:
    return [[combine(a, b) for a, b in zip(one, other, strict=True)] for one, other in zip(ours, theirs, strict=True)]
