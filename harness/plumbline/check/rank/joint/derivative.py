"""The derivative of the joint forward along directions through some parameters, and what was received for them.

The directional derivative of S (see ``forward``), divided by the number of losses unless gradients are sums, is
compared with what was received.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from plumbline.check.rank.joint.copies_and_parts import (
    COARSE,
    LIMIT,
    LIMIT_16_BIT,
    Beginnings,
    Family,
    Group,
    Key,
    grouped,
)
from plumbline.check.rank.joint.forward import JointForward, RecordedCall, unit_of
from plumbline.check.rank.joint.holders import note_holders
from plumbline.check.rank.joint.meetings import Meetings, told
from plumbline.check.rank.joint.own_shards import along_dimensions
from plumbline.check.rank.joint.reductions import used_after_reductions
from plumbline.check.rank.joint.stages import Sent, changed_on_the_way, passed_on, successive
from plumbline.check.rank.joint.uses import followed_uses
from plumbline.check.rank.joint.weights import STEP, JointParameter, JointWeights, has_memory_for, leaves_of, product
from plumbline.check.rank.store_exchange import Exchange, NoAgreementError
from plumbline.replay.call import Activation
from plumbline.replay.collectives import all_arrive, members_of_groups
from plumbline.replay.derivatives import InPlace
from plumbline.replay.function_derivatives import can_be_a_derivative
from plumbline.replay.precision import ReplayPrecision

LONGER = 2.0**6
"""By how much more, or less, than usual the weights of one parameter are moved."""

MORE_KINKS = 2.0**8
"""By how much larger rounding errors are simulated to see what they do at kinks. At a unit of a piecewise linear layer
that changes sides the gradient jumps. Few units do, so that often none does in a simulation where one did in training.
Their number is proportional to the rounding error, and the root mean square of their sum to its square root."""

LIMIT_AT_KINKS = 4 * LIMIT**0.5
"""Largest error of a right gradient, in multiples of the noise at kinks: four standard deviations, where rounding
errors may be ``LIMIT`` times larger than simulated."""

SUSPICIOUS = 4.0
"""The largest error, in multiples of the noise, that is expected in a 16-bit format: four standard deviations."""

MORE_ROUNDINGS = 8
"""How often rounding is simulated again for a suspicious error in a 16-bit format. One simulation of a loss that all
ranks compute together is one normal number: less than a sixteenth of its standard deviation once in twenty times."""

LIMIT_OF_MORE = 12.0
"""Largest error of a right gradient then, in multiples of the noise: four standard deviations, where the true deviation
may be three times the estimate. The rounding of the backward pass is not simulated: in Megatron-LM's bfloat16 training,
errors have 2.3 times the estimated deviation."""

SAME_FACTOR = 1e-6
"""Relative difference up to which losses, and the factors that ranks find in their gradients, count as equal."""

OTHER_TENSORS = (
    "the forward communicates, and no optimizer holds the parameters of its modules. Gradients of other tensors, such "
    "as hand-written shards, are judged only if each rank can compute its own"
)

SPREAD = 4.0
"""Distance of an ordinary forward's outputs from exact ones, in unit roundoffs."""


@dataclass(frozen=True)
class Reading:
    """How gradients are read: as derivatives of the sum or the mean of the ranks' losses, with a view of collectives.

    ``once``: losses that several ranks compute together count once in the mean. ``of_losses``: S has only the terms of
    passes that begin at a loss, because forwards themselves pass activations on. ``in_place``: what collectives add to
    tensors in place. ``derives``: values that other collectives return without a gradient depend on the tensors of all
    ranks; otherwise they are constants. ``factor``: a factor in all gradients, for example because a trainer's own code
    has divided them by a loss scale, or clipped them. ``factor_error``: the noise of the factor, relative to it.
    ``is_by_hand``: the script was seen to multiply all gradients by the factor.
    """

    is_sum: bool = False
    once: bool = False
    of_losses: bool = False
    in_place: InPlace = InPlace.DERIVED
    derives: bool = False
    factor: float = 1.0
    factor_error: float = 0.0
    is_by_hand: bool = False

    @property
    def forward(self) -> tuple[InPlace, bool]:
        """What the recomputed forward depends on."""
        return self.in_place, self.derives


@dataclass(frozen=True)
class RankLosses:
    """The loss values from which a rank's backward passes began, if they began at a loss.

    ``are_computed_together``: a function that communicates has computed them from the outputs of modules. ``ranks``:
    the number of ranks in its group. ``have_parts``: its backward gives each of them the derivative of one loss with
    respect to the rank's own outputs. ``begin_at_losses``: the same for each pass, by its number. ``sent``: the
    activations at which the other passes begin, with the gradients that the script gives there. ``received``:
    activations that reach calls only through other operations.
    """

    values: Sequence[float]
    are_computed_together: bool = False
    ranks: int = 1
    have_parts: bool = False
    begin_at_losses: Mapping[int, bool] = field(default_factory=dict)
    sent: Sequence[Sent] = ()
    received: Sequence[Activation] = ()


@dataclass(frozen=True)
class Difference:
    """The derivative of S along a direction, and what was received for each parameter.

    ``shares``: the terms of the derivative by rank and pass. ``right``: their sum. ``limit``: the largest error of
    right gradients. ``received``: the product of each parameter's gradient with the direction. ``left``: the same with
    the gradient of the previous step, which remains if it is not zeroed. ``typical``: the standard deviation of
    ``received`` over random directions.
    """

    shares: list[list[float]]
    right: float
    noise: float
    limit: float
    received: Mapping[int, float]
    left: Mapping[int, float]
    typical: Mapping[int, float]

    def error(self, groups: Iterable[int]) -> float:
        """Return the distance of what was received for these groups together from the right value."""
        return abs(self.received_for(groups) - self.right)

    def received_for(self, groups: Iterable[int]) -> float:
        """Return what was received for these groups together."""
        return sum(self.received[one] for one in groups)


Terms = list[list[float]]
"""The terms of S by rank and pass."""

Sides = tuple[Terms, Terms]
"""The terms of S with the weights moved forth and back."""


@dataclass
class Along:
    """What a direction shows, whatever the normalisation and factor of gradients.

    ``rough``: with simulated rounding. ``again``: with further simulations, once they are needed: ``MORE_ROUNDINGS`` in
    16-bit formats, else one with ``MORE_KINKS`` times larger errors. ``products``: for each rank, those of the
    direction with the received gradients, by the index of the parameter.
    """

    exact: Sides
    rough: Sides
    products: Sequence[Mapping[str, Sequence[float]]]
    again: Sequence[Sides] = ()


class JointDerivative:
    """Differentiates the forward of one step together with all other ranks, and holds the gradients received.

    ``every``: each rank's descriptions of its parameters. ``groups``: which of these belong together. ``losses``: the
    number of ranks that compute a loss. ``has_same_loss``: all their losses are equal. ``has_one_loss``: they are also
    computed from equal outputs. ``ranks_of_a_loss``: the number of ranks that compute each loss together.
    ``has_parts_of_losses``: each of these ranks has its part of the gradient of one loss. ``communicate``: for each
    rank, whether its forward communicates. ``may_pass_on``: forwards that communicate may pass activations on, whose
    gradients ranks exchange themselves. ``receives_constants``: the forward combines tensors that have a gradient with
    values that collectives return as constants. ``adds_gradients``: the names of custom functions that add gradients of
    their own. ``unrepeatable``: those that cannot be verified. ``changed``: gradients that changed between pipeline
    stages. ``not_compared``: ranks whose gradients at received activations were not compared. ``in_place``: the
    readings of in-place collectives to try. ``is_first``: no step was compared before. ``are_copies``: optimizers step
    copies of all parameters. ``squares``: the squared norms of the gradients taken so far, by rank and number.
    ``factor``: the factor in all of these gradients and its relative error, None before any was compared. ``by_hand``:
    the factor by which the script was seen to multiply gradients on every rank, 1 without one. ``is_edited``: the
    script changed gradients, but not all by one factor. ``step``: each step has its own directions in 16-bit formats,
    where the directions of all steps are judged together.
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
        by_hand: float | None = 1.0,
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
            "parts": losses.have_parts,
            "unit": unit_of(calls),
            "divisors": list(divisors),
            "by_hand": by_hand,
            "communicates": any(map(any, collectives.values())),
            "groups": list(members_of_groups().values()),
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
        self.ranks_of_a_loss = losses.ranks if self._are_shared(losses.ranks) else 1
        is_one_of_several = 1 < self.ranks_of_a_loss < self.losses
        self.has_parts_of_losses = is_one_of_several and all(one["parts"] for one in theirs)
        factors = [one["by_hand"] for one in theirs]
        known = [one for one in factors if one is not None]
        is_one = all(math.isclose(one, known[0], rel_tol=max(self.unit, SAME_FACTOR)) for one in known)
        self.is_edited = not (is_one and len(known) == len(factors))
        self.by_hand: float = 1.0 if self.is_edited else known[0]
        self.communicate = [one["communicates"] for one in theirs]
        self.sets_of_ranks = _sets_of_ranks(len(theirs), [group for one in theirs for group in one["groups"]])
        self._beginnings = beginnings
        self.squares: dict[Key, float] = {}
        self.factor: tuple[float, float] | None = None
        self._measured: dict[object, Along] = {}
        self.receive(held)
        passed = exchange.values(passed_on(calls, losses.sent, losses.received))
        self.changed, self.not_compared = changed_on_the_way(passed, self.unit)
        gathered = leaves_of(one.call.module for one in calls)
        self._weights = JointWeights(ReplayPrecision.FLOAT64, held, gathered)
        self._forward = JointForward(self._with_own_losses(calls), self._weights)
        counts = exchange.values([losses.begin_at_losses.get(number, True) for number in self._forward.passes])
        self._at_losses: list[list[bool]] = counts
        self.may_pass_on = any(self.communicate) and not all(map(all, self._at_losses))

        def rehearse(verify: bool) -> list[list[Any]]:
            native = JointWeights(ReplayPrecision.NATIVE, held, gathered)
            return self._rehearsed(lambda: self._forward.rehearse(native, verify=verify))

        self.unrepeatable: list[str] = []
        with used_after_reductions(self._weights) as used, followed_uses(self._weights, self._parts()) as uses:
            try:
                self._still = rehearse(verify=True)
            except NoAgreementError:
                self.unrepeatable = sorted({*filter(None, exchange.values(self._forward.unrepeatable))})
                if not self.unrepeatable:
                    raise
                self._still = rehearse(verify=False)
        for names in exchange.values([one.name for one in held if id(one.parameter) in used]):
            beginnings.after_reductions.update(names)
        names = {id(one.parameter): one.name for one in held}
        order = [(names[number], first) for number, first in uses.first.items() if number in names]
        every_use = exchange.values([order, [names[number] for number in uses.on_rows if number in names]])
        beginnings.on_rows.update(set(every_use[0][1]).intersection(*(own for _, own in every_use)))
        beginnings.uses, beginnings.successive = [own for own, _ in every_use], successive(passed)
        self._group()
        # A loss that is summed over ranks only for printing also has one value.
        self.has_one_loss = self.has_same_loss and all(
            len(own) == len(self._still[0]) and all(map(_are_near, own, self._still[0])) for own in self._still
        )
        forward = self._forward
        measured = {
            "magnitude": forward.magnitude,
            "spread": forward.spread,
            "in_place": forward.changes_in_place,
            "receives": forward.receives_constants,
            "adds": sorted(forward.adds_gradients),
        }
        every = exchange.values(measured)
        self._magnitude = sum(one["magnitude"] for one in every)
        # A forward may compute in a coarser format than its parameters and outputs show.
        self.unit = max([self.unit, *(one["spread"] / SPREAD for one in every)])
        self.in_place = [*InPlace] if any(one["in_place"] for one in every) else [InPlace.DERIVED]
        self.receives_constants = any(one["receives"] for one in every)
        self.adds_gradients = sorted({name for one in every for name in one["adds"]})
        self.limit = LIMIT_16_BIT if self.is_coarse else LIMIT
        self._rehearsed(lambda: self._forward.rehearse_roughly(self.unit))

    @property
    def is_coarse(self) -> bool:
        """Whether the forward computes in a 16-bit format, where all errors are of similar size.

        In finer formats, a few units that change sides cause single large errors.
        """
        return self.unit >= COARSE

    def have_one_loss(self, ranks: Collection[int]) -> bool:
        """Return whether ranks appear to compute one loss together, each from its part of the outputs."""
        first, *others = (self._losses[rank] for rank in ranks)
        near = max(self.unit, SAME_FACTOR)
        return self._are_computed_together and bool(first) and all(_are_equal(own, first, near) for own in others)

    def _with_own_losses(self, calls: Sequence[RecordedCall]) -> list[RecordedCall]:
        """Return the calls, ``apart`` only along a dimension of a mesh with all losses, if these differ.

        Gradients that are summed over some dimensions and averaged over others have no ``Reading``.
        """
        near = max(self.unit, SAME_FACTOR)
        own = [
            [
                dimension
                for dimension, ranks in along_dimensions(one.cotangents).items()
                if dimension in one.apart
                and len(ranks) == self.losses
                and not all(_are_equal(self._losses[ranks[0]], self._losses[rank], near) for rank in ranks)
            ]
            for one in calls
        ]
        agree = all(other == own for other in self._exchange.values(own))
        return [replace(one, apart=frozenset(each if agree else ())) for one, each in zip(calls, own, strict=True)]

    def _are_shared(self, ranks: int) -> bool:
        """Return whether every loss is that of as many ranks, or of a multiple of this number."""
        near = max(self.unit, SAME_FACTOR)
        counts = [sum(_are_equal(own, other, near) for other in self._losses) for own in self._losses]
        return all(counted % ranks == 0 for counted in counts)

    def receive(self, held: Sequence[JointParameter]) -> None:
        """Take the gradients that ``held`` parameters have now. The parameters are the same at each call."""
        self._held, self._measured = held, {}
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
        self._group()

    def _group(self) -> None:
        """Group the parameters, and choose how far to move the entries of each: all then change S about equally.

        Otherwise those with small gradients would show nothing beside the others. ``_typical`` has the standard
        deviation of the product of each group's gradient with a direction.
        """
        self.groups = grouped(self.every, self.unit, self._beginnings)
        norms = [
            math.sqrt(sum(self.every[rank][number]["square"] for rank, number in group.instances[0]))
            for group in self.groups
        ]
        effects = [norm * group.size for norm, group in zip(norms, self.groups, strict=True)]
        usual = statistics.median([one for one in effects if one] or [1.0])
        longer = [min(max(usual / one if one else 1.0, 1 / LONGER), LONGER) for one in effects]
        self._lengths = [group.size * by for group, by in zip(self.groups, longer, strict=True)]
        self._typical = [effect * by for effect, by in zip(effects, longer, strict=True)]

    def take_complete(self) -> list[int]:
        """Return the indices of the parameters whose gradients are complete now and were not taken before."""
        complete = [
            index
            for index, group in enumerate(self.groups)
            if all(self.every[rank][number]["complete"] for rank, number in group.keys)
        ]
        new = [index for index in complete if not self.groups[index].keys & self.squares.keys()]
        for rank, number in (key for index in new for key in self.groups[index].keys):
            self.squares[rank, number] = self.every[rank][number]["square"]
        return new

    def _parts(self) -> set[int]:
        """Return the ids of this rank's parameters that are not the same on all ranks."""
        holders: dict[Family, set[int]] = {}
        for group in self.groups:
            holders.setdefault(group.kind.family, set()).update(group.ranks)
        return {
            id(self._held[number].parameter)
            for group in self.groups
            for rank, number in group.keys
            if rank == self._rank
            and (
                len(holders[group.kind.family]) < len(self.every)
                or not self._beginnings.began_alike(group.kind)
                or self.every[rank][number]["copies"] < len(self.every[rank][number]["ranks"])
            )
        }

    @property
    def has_all(self) -> bool:
        """Whether the gradients of all parameters were taken."""
        return all(group.keys <= self.squares.keys() for group in self.groups)

    def _agree(self, collectives: Mapping[str, list[int]]) -> None:
        """Make sure that all members of each process group used it equally often in their calls."""
        members = members_of_groups()
        counts = {
            name: [members[name], [one for one in given if one]]
            for name, given in collectives.items()
            if name in members
        }
        messages = {name: sum(given) for name, given in collectives.items() if name not in members}
        everywhere = self._exchange.values([counts, messages])
        for own, _ in everywhere:
            for name, (ranks, given) in own.items():
                if any(everywhere[rank][0].get(name, [ranks, []]) != [ranks, given] for rank in ranks if given):
                    raise NoAgreementError("ranks called different numbers of collectives in the forward")
        if not all_arrive(sent for _, sent in everywhere):
            raise NoAgreementError("ranks sent messages in the forward that others receive elsewhere")

    def _rehearsed(self, compute: Callable[[], list[Any]]) -> list[list[Any]]:
        """Compute together for the first time, so that errors on one rank alone appear here. See ``_all``."""

        def met() -> list[Any]:
            with self._meetings.held():
                return compute()

        return self._all(met)

    def _all(self, compute: Callable[[], list[Any]]) -> list[list[Any]]:
        """Compute together, and return each rank's result. All ranks give up if one of them fails."""
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
        indices: Sequence[int],
        seed: str,
        instead: Mapping[int, Group] | None = None,
        *,
        part_of: Collection[int] | None = None,
    ) -> Difference:
        """Return the derivative of S along a direction through some of the parameters.

        ``part_of``: the direction goes only through the parts that these ranks hold.
        """
        groups = {index: (instead or {}).get(index, self.groups[index]) for index in indices}
        held = None if part_of is None else frozenset(part_of)
        key = tuple(groups.values()), seed, held, self._reading.forward
        along = self._measured.get(key)
        if along is None:
            along = self._measured[key] = self._along(groups, seed, part_of)
        found = self._difference(indices, along)
        if found.error(indices) > (SUSPICIOUS * found.noise if self.is_coarse else found.limit):
            if not along.again:
                directions, _ = self._directions(groups, seed, part_of)
                more = [(self.unit, 1 + number) for number in range(MORE_ROUNDINGS)]
                along.again = self._sides(directions, *(more if self.is_coarse else [(MORE_KINKS * self.unit, 0)]))
            found = self._difference(indices, along)
        return found

    def _difference(self, indices: Sequence[int], along: Along) -> Difference:
        forth, back = map(self._counted, along.exact)
        shares = self._derivatives(along.exact)
        bends = [
            (a + b - 2 * c) / (2 * STEP * self._of)
            for one, other, still in zip(forth, back, self._counted(self._still), strict=True)
            for a, b, c in zip(one, other, still, strict=True)
        ]
        factor = self._reading.factor
        received, left_over = (
            {
                index: sum(own[str(index)][kind] for own in along.products if str(index) in own) / factor
                for index in indices
            }
            for kind in (0, 2)
        )
        squares = sum(value[1] for own in along.products for value in own.values()) / factor**2
        rounded = math.hypot(*self._changes(shares, along.rough))
        again = [math.hypot(*self._changes(shares, one)) for one in along.again]
        kinks = 0.0
        if again and self.is_coarse:
            rounded = LIMIT_OF_MORE * math.hypot(rounded, *again) / math.sqrt(1 + len(again)) / self.limit
        elif again:
            kinks = LIMIT_AT_KINKS * math.hypot(*again) / math.sqrt(MORE_KINKS) / self.limit
        cancelled = 2.0**-52 * self._magnitude / (STEP * self._of)
        differences = 4 * math.hypot(*bends) / self.limit
        right = math.fsum(map(math.fsum, shares))
        of_factor = right * self._reading.factor_error
        noise = math.hypot(self.unit * math.sqrt(squares), rounded, kinks, differences, cancelled, of_factor)
        if not math.isfinite(noise):
            raise NoAgreementError("the recomputed forward is not finite")
        typical = {index: self._typical[index] / abs(factor) for index in indices}
        return Difference(shares, right, noise, self.limit * noise, received, left_over, typical)

    def _derivatives(self, sides: Sides) -> Terms:
        forth, back = map(self._counted, sides)
        return _combined(forth, back, lambda a, b: (a - b) / (2 * STEP * self._of))

    def _changes(self, shares: Sequence[Sequence[float]], sides: Sides) -> list[float]:
        rough = _combined(shares, self._derivatives(sides), lambda a, b: a - b)
        return [change for one in rough for change in one]

    def _along(self, groups: Mapping[int, Group], seed: str, part_of: Collection[int] | None) -> Along:
        """Compute S on both sides of the weights, and the products of the direction with what was received."""
        directions, products = self._directions(groups, seed, part_of)
        exact, rough = self._sides(directions, None, (self.unit, 0))
        every = self._exchange.values({str(index): value for index, value in products.items()})
        return Along(exact, rough, every)

    def _directions(
        self, groups: Mapping[int, Group], seed: str, part_of: Collection[int] | None
    ) -> tuple[dict[int, Tensor], dict[int, tuple[float, float, float]]]:
        of_step = f"{self._step} " if self.is_coarse else ""
        directions: dict[int, Tensor] = {}
        products: dict[int, tuple[float, float, float]] = {}
        for index, group in groups.items():
            for rank, number in group.keys:
                if rank == self._rank:
                    one = self._held[number]
                    along = one.direction(f"{of_step}{seed} {index}", self._lengths[index])
                    if part_of is not None:
                        along = one.own_part(along) if rank in part_of else torch.zeros_like(along)
                    directions[id(one.parameter)] = along
                    if (rank, number) in group.instances[0]:
                        copies = self.every[rank][number]["copies"]
                        left, _ = product(self._left.get(id(one.parameter)), along, copies)
                        products[index] = *product(self._gradients[number], along, copies), left
        return directions, products

    def _sides(self, directions: Mapping[int, Tensor], *roundings: tuple[float, int] | None) -> list[Sides]:
        """Return the terms of S on both sides of the weights, for each unit roundoff and seed; None is for float64."""
        forth, back = (self._at(directions, length, roundings) for length in (STEP, -STEP))
        return list(zip(forth, back, strict=True))

    def _at(
        self, directions: Mapping[int, Tensor], length: float, roundings: Sequence[tuple[float, int] | None]
    ) -> Iterator[Terms]:
        def compute() -> list[list[float]]:
            self._weights.move(directions, length)
            return [self._forward.terms(rounding) for rounding in roundings]

        return map(list, zip(*self._all(compute), strict=True))

    def _counted(self, terms: Terms) -> Terms:
        """Return the terms of S, by rank and pass, with zeros for those that the reading leaves out."""
        if not self._reading.of_losses:
            return terms
        return [
            [term if counts else 0.0 for term, counts in zip(own, kept, strict=True)]
            for own, kept in zip(terms, self._at_losses, strict=True)
        ]

    def read_as(self, reading: Reading) -> None:
        """Interpret the gradients by ``reading`` from now on."""
        self._reading = reading
        self._of = 1.0 if reading.is_sum else self._mean_of / (self.ranks_of_a_loss if reading.once else 1)
        self._forward.take(reading.in_place, derives=reading.derives)

    @property
    def divided_by(self) -> float:
        """The number by which the sum of the ranks' losses is divided before it is differentiated."""
        return self._of * (self.ranks_of_a_loss if self._reading.once else 1)

    def not_derivatives(self) -> list[str]:
        """Return the names of communicating functions whose backward cannot be the derivative of any forward."""
        if self.unrepeatable:
            return []
        self._weights.move({}, 0.0)
        every = self._all(self._forward.exchanges)
        names = [[name for name, _ in own] for own in every]
        if any(own != names[0] for own in names):
            return []
        wrong = [
            name for index, name in enumerate(names[0]) if not can_be_a_derivative([own[index][1] for own in every])
        ]
        return list(dict.fromkeys(wrong))


def _sets_of_ranks(world: int, groups: Iterable[Sequence[int]]) -> list[list[set[int]]]:
    """Return the ways to divide all ranks into sets: into single ranks, or into process groups of one size."""
    found = [[{rank} for rank in range(world)]]
    for group in map(set, groups):
        fitting = (own for own in found if len(own[0]) == len(group))
        of = next((own for own in fitting if group in own or not any(map(group.intersection, own))), None)
        if of is None:
            found.append([group])
        elif group not in of:
            of.append(group)
    return [own for own in found if len(own) > 1 and sum(map(len, own)) == world]


def _are_equal(ours: Sequence[float], theirs: Sequence[float], near: float) -> bool:
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(math.isclose(a, b, rel_tol=near) for a, b in pairs)


def _are_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)


def _combined(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], combine: Callable[[float, float], float]
) -> list[list[float]]:
    return [[combine(a, b) for a, b in zip(one, other, strict=True)] for one, other in zip(ours, theirs, strict=True)]
