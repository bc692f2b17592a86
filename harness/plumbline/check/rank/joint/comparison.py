"""Compares the gradients that optimizers receive with the derivative of the joint forward, and finds wrong ones.

A received gradient is right if its product with a direction is the derivative of S (see ``forward``) along it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch.distributed
from torch import Tensor

from plumbline.check.rank.joint.copies_and_parts import (
    Beginnings,
    Group,
    Key,
    Kind,
    have_one_gradient,
    perhaps_tied,
    replicas_of_stages,
    tied_apart,
)
from plumbline.check.rank.joint.derivative import SUSPICIOUS, Difference, JointDerivative, RankLosses, Reading
from plumbline.check.rank.joint.forward import RecordedCall
from plumbline.check.rank.joint.meetings import Meetings
from plumbline.check.rank.joint.weights import JointParameter
from plumbline.check.rank.store_exchange import AbsentRankError, Exchange, NoAgreementError
from plumbline.recording.observer import Facts
from plumbline.replay.derivatives import InPlace

ROUNDS = 16
"""The most directions that are tried. Each shows the parameters whose gradients exceed the noise of all remaining ones:
only a few at a time in 16-bit formats. Parameters that no direction shows are left out."""

MOST_UNCONFIRMED = 3
"""After this many wrong directions through many parameters, these count as wrong although no direction through fewer
shows it."""

UNLUCKY = 2
"""After this many directions in a row that show none of the remaining parameters, no more are tried."""

RARELY = 4.0
"""A direction shows a parameter only by chance if it needs more than so many standard deviations to do so."""

MOST_HALVES = 48
"""After this many comparisons, the search for single wrong parameters among those of a wrong direction stops."""

OF_A_FACTOR = ("scaled 0", "scaled 1", "scaled 2", "scaled 3")
"""Seeds of directions that must all show the same factor before it counts as one in all gradients. They also decide
which reading is nearest."""

MOST_READINGS = 4
"""How many readings of a step's gradients may be refuted before the gradients count as wrong."""

UNKNOWN_FACTOR = (
    "the copies in the optimizers received different gradients than the model's parameters, and these are too small to "
    "tell whether they were only clipped"
)

NO_GRADIENT_YET = (
    "the optimizers hold copies of the weights, but no copy had a gradient on all ranks when an optimizer stepped"
)

MOST_OWN = 4
"""The most parameters whose copies are tested for effects on the same ranks, and the most other copies of wrong
parameters that are compared."""

MOST_ALONG_COPIES = 4
"""The most directions that are tried to tell whether a copy received its own gradient or that of all copies."""


WRONG_OR_APART = "at an earlier step, gradients were wrong, or copies of a parameter differed by more than rounding"
"""Why later steps are not compared: their weights result from that step."""


FIRST = "0"
"""The seed of the first direction."""


class NothingInPartsError(Exception):
    """No rank is known to compute only a part of a forward."""


class JointComparison:
    """Compares the gradients of one process's optimizers together with all other ranks.

    Nothing more is compared after a rank did not arrive or failed, or after a step with wrong gradients: ``obstacle``
    says why. The first step whose gradients are clear enough decides on the reading (see ``Reading``) for later steps.
    """

    def __init__(self, exchange: Exchange, meetings: Meetings) -> None:
        self._exchange = exchange
        self._meetings = meetings
        self._beginnings = Beginnings()
        self._left: dict[int, Tensor | None] = {}
        self._reading: Reading | None = None
        self._waiting: JointDerivative | None = None
        self._left_out: set[str] = set()
        self._steps = 0
        self.obstacle = ""

    def forget(self) -> None:
        """Drop the kept gradients."""
        self._left = {}
        self._waiting = None

    def compare(
        self,
        calls: Sequence[RecordedCall],
        held: Sequence[JointParameter],
        losses: RankLosses,
        divisors: Collection[float] = (),
        beside: Collection[str] = (),
        by_hand: float | None = 1.0,
        *,
        in_parts: bool = True,
    ) -> Facts:
        """Compare the gradients that ``held`` parameters have now; the result is the same on all ranks.

        All ranks must call this at the same step. ``divisors``: the numbers by which the script has gradients divided,
        as multiples of the number of ranks that reduce them. ``beside``: names of parameters on which this rank's loss
        depends other than through the outputs of calls, for example through a loss that a module holds. S lacks these
        terms, so such parameters are left out. ``by_hand``: the factor by which the script multiplied all gradients
        after the backward passes, None if it changed them in another way. ``in_parts``: whether this rank is known to
        compute only a part of a forward. If no rank is, each can compute its gradients alone, and the result is empty:
        its inputs may be leaves for other reasons than in a pipeline, as where the loss has derivatives by them.
        """

        def begin() -> JointDerivative:
            known = self._exchange.values([in_parts, *beside])
            if not any(one for one, *_ in known):
                raise NothingInPartsError
            self._left_out = {name for _, *names in known for name in names}
            own = self._without_those_beside(held)
            return JointDerivative(
                self._exchange, self._meetings, self._beginnings, calls, own, left, losses, divisors, by_hand, step
            )

        left, self._left, self._waiting = self._left, {}, None
        step = self._steps = self._steps + 1
        return self._compared(held, begin)

    def received_elsewhere(self, own: Sequence[str]) -> set[str]:
        """Return the digests of activations that other ranks have received. All ranks must call this together."""
        if self.obstacle:
            return set()
        try:
            every = self._exchange.values(own)
        except AbsentRankError as error:
            self.leave(str(error))
            return set()
        rank = torch.distributed.get_rank()
        return {digest for other, found in enumerate(every) if other != rank for digest in found}

    @property
    def is_waiting(self) -> bool:
        """Whether some parameter copies in optimizers had no gradient yet when the others were compared."""
        return self._waiting is not None

    def resume(self, held: Sequence[JointParameter]) -> Facts:
        """Compare the copies that have received their gradients since, with the same forward as the others."""

        def go_on() -> JointDerivative:
            assert self._waiting is not None
            self._waiting.receive(self._without_those_beside(held))
            return self._waiting

        return self._compared(held, go_on)

    def _without_those_beside(self, held: Sequence[JointParameter]) -> list[JointParameter]:
        return [one for one in held if one.name not in self._left_out]

    def _compared(self, held: Sequence[JointParameter], prepare: Callable[[], JointDerivative]) -> Facts:
        if self.obstacle:
            return {"why": self.obstacle}
        try:
            try:
                found = self._search(prepare())
            except NothingInPartsError:
                return {}
            except NoAgreementError as error:
                self._waiting = None
                found = {"why": str(error)}
            self._left |= {id(one.parameter): one.received() for one in held if one.is_complete}
            return found
        except AbsentRankError as error:
            self.leave(str(error))
        except Exception as error:  # on this rank alone, perhaps
            self.leave(f"recomputing the forward on all ranks failed: {type(error).__name__}: {error}")
        self._waiting = None
        return {"why": self.obstacle}

    def _search(self, derivative: JointDerivative) -> Facts:
        """Look for wrong gradients among the complete ones that were not compared before."""
        indices = derivative.take_complete()
        if not indices:
            raise NoAgreementError(NO_GRADIENT_YET)
        search = GradientSearch(derivative, self._beginnings, self._reading, indices)
        found, self._reading = search.facts(), search.known
        if found["wrong"]:
            self.obstacle = WRONG_OR_APART
        self._waiting = None if found["wrong"] or derivative.has_all else derivative
        return found

    def leave(self, why: str) -> None:
        """Stop comparing on this rank, and tell the ranks that wait for it, now or when they arrive, why."""
        if not self.obstacle:
            self.obstacle = why
            with suppress(RuntimeError):  # the store can be gone
                self._exchange.leave(why)
                self._meetings.leave(why)


class GradientSearch:
    """Finds the parameters whose gradients are wrong, with few directions."""

    def __init__(
        self, derivative: JointDerivative, beginnings: Beginnings, known: Reading | None, indices: Sequence[int]
    ) -> None:
        self._derivative = derivative
        self._beginnings = beginnings
        self._groups = derivative.groups
        self._every = derivative.every
        self._indices = indices
        self._parts: set[int] = set()
        self._rejected: list[Reading] = []
        self._is_settled = False
        self._was_known = known is not None
        self.known = known

    def facts(self) -> Facts:
        """Compare the gradients of all parameters in ``indices``, along few directions."""
        return self._facts(*self._read(FIRST))

    def _facts(self, reading: Reading, difference: Difference) -> Facts:
        """Compare the gradients under this reading. ``difference`` is the one along the first direction."""
        remaining = list(self._indices)
        judged: list[int] = []
        found: Facts = {
            "noise": [],
            "wrong": [],
            "unsearched": [],
            "limit": self._derivative.limit,
            "losses": self._derivative.losses,
            "ranks": len(self._every),
        }
        right: list[Facts] = []
        found["right"] = right
        found["one_loss"], found["same_loss"] = self._derivative.has_one_loss, self._derivative.has_same_loss
        found["ranks_of_a_loss"] = self._derivative.ranks_of_a_loss
        is_divided_again = self._derivative.has_parts_of_losses and not (reading.once or reading.is_sum)
        found["divided_again"] = is_divided_again
        found["changed"], found["not_compared"] = self._derivative.changed, self._derivative.not_compared
        found["divided_by"], found["adds"] = self._derivative.divided_by, self._derivative.adds_gradients
        found["is_sum"], found["in_place"] = reading.is_sum, reading.in_place is not InPlace.DERIVED
        found["edited"], found["unrepeatable"] = self._derivative.is_edited, self._derivative.unrepeatable
        found["leaves_out"] = self._leaves_out(reading, difference)
        found["cut_off"] = self._named(self._cut_off(reading)) if found["leaves_out"] else []
        if reading.is_by_hand:
            found["by_hand"] = reading.factor
        elif reading.factor != 1:
            found["scaled"] = self._scaled(reading, difference)
        unlucky, is_suspicious = 0, False
        unconfirmed: list[Facts] = []
        found["unconfirmed"] = unconfirmed
        for number in range(ROUNDS):
            if number:
                difference = self._derivative.difference(remaining, f"{number}")
            if difference.error(remaining) > difference.limit:
                if number and (other := self._read_again(reading, f"{number}")) is not None:
                    return self._facts(*other)
                explained = len(self._parts)
                found["wrong"], searched, unsearched = self._apart(remaining, right, len(unconfirmed))
                found["unsearched"] = self._named(unsearched)
                judged += searched
                if not found["wrong"] and len(self._parts) == explained and self._derivative.is_coarse:
                    # No direction through fewer parameters shows it: see whether another one through many does.
                    unconfirmed.append(self._measured(difference, remaining))
                    if len(unconfirmed) < MOST_UNCONFIRMED:
                        remaining, unlucky = list(self._indices), 0
                        continue
                    found["wrong"] = [self._wrong(remaining, difference)]
                    found["unsearched"] = self._named(remaining)
                    judged = [index for index in judged if index not in remaining]
                found["not_derivatives"] = self._derivative.not_derivatives()
                break
            if difference.noise:
                found["noise"].append(difference.error(remaining) / difference.noise)
            right.append(self._measured(difference, remaining))
            is_suspicious = is_suspicious or self._is_suspicious(difference, remaining)
            seen = [index for index in remaining if self._shows(difference, index)]
            judged += [index for index in seen if not self._groups[index].is_doubtful]
            remaining = [index for index in remaining if index not in seen]
            unlucky = 0 if seen else unlucky + 1
            if unlucky == UNLUCKY or not remaining or (unlucky and self._hides(difference, remaining)):
                if not unconfirmed and not is_suspicious:
                    break
                remaining, unlucky = list(self._indices), 0
        doubtful = [index for index in self._indices if self._groups[index].is_doubtful]
        found["alike"] = self._named(sorted(self._parts))
        found["judged"] = self._named(sorted(set(judged)))
        found["doubtful"] = self._named(doubtful)
        found["layers"] = self._named(index for index in self._indices if self._groups[index].is_layer)
        found["norms"], found["parameters"] = self._norms(), len(self._groups)
        own = [] if found["wrong"] else self._not_averaged(doubtful)
        found["own"] = self._named(own)
        self._derivative.factor = reading.factor, reading.factor_error
        found["tied_apart"] = self._pairs(tied_apart(self._every, self._groups, self._derivative.unit))
        maybe = perhaps_tied(self._every, self._groups, self._derivative.unit) if self._derivative.is_first else []
        found["perhaps_tied"] = self._pairs(maybe)
        return found

    def _pairs(self, pairs: Iterable[Sequence[Key]]) -> list[list[list[object]]]:
        return [[[self._every[rank][number]["name"], rank] for rank, number in pair] for pair in pairs]

    def _leaves_out(self, reading: Reading, difference: Difference) -> bool:
        """Return whether gradients would differ if values received from other ranks were not constants."""
        if reading.derives or not self._derivative.receives_constants:
            return False
        whole = self._read_as(replace(reading, derives=True), FIRST)
        self._derivative.read_as(reading)
        return abs(whole.right - difference.right) > max(whole.limit, difference.limit)

    def _cut_off(self, reading: Reading) -> list[int]:
        """Return parameters without a gradient that have one if values received from other ranks are not constants."""
        none = [
            index
            for index in self._indices
            if not any(self._every[rank][number]["square"] for rank, number in self._groups[index].keys)
        ]
        found = []
        for index in none[:MOST_OWN]:
            constant = self._read_as_one(reading, index)
            whole = self._read_as_one(replace(reading, derives=True), index)
            if abs(constant.right) <= constant.limit and abs(whole.right) > whole.limit:
                found.append(index)
        self._derivative.read_as(reading)
        return found

    def _read_as_one(self, reading: Reading, index: int) -> Difference:
        self._derivative.read_as(reading)
        return self._derivative.difference([index], f"cut off {index}")

    def _is_suspicious(self, difference: Difference, indices: Iterable[int]) -> bool:
        """Return whether more directions may reveal gradients left from the previous step below the limit.

        Only 16-bit formats can hide gradients of that size.
        """
        is_large = difference.error(indices) > SUSPICIOUS * difference.noise
        return self._derivative.is_coarse and is_large and any(difference.left[index] for index in indices)

    def _not_averaged(self, doubtful: Sequence[int]) -> list[int]:
        """Return the parameters that began alike on several ranks, and that affect the terms of S of different ranks.

        These are replicas, each with its own samples. Parts of a layer affect the same terms, or one loss that several
        ranks compute from their parts of the outputs. Pipeline stages run separately, so their effects tell nothing.
        There, ranks hold replicas if they hold the same stage and its forward does not communicate. A script that makes
        the weights equal after a step may average the weights instead.

        Parameters that ranks apply to their rows of one matrix are replicas in any case.
        """
        on_rows = [index for index in doubtful if self._groups[index].name in self._beginnings.on_rows]
        if on_rows:
            return on_rows
        if self._derivative.losses < len(self._every):
            silent = [
                index
                for index in doubtful
                if not any(self._derivative.communicate[one] for one in self._groups[index].ranks)
            ]
            return replicas_of_stages(
                self._every, self._groups, silent, self._derivative.unit, is_first=self._derivative.is_first
            )
        kinds: dict[Kind, list[int]] = {}
        for index in doubtful:
            kinds.setdefault(self._groups[index].kind, []).append(index)
        found: list[int] = []
        for indices in list(kinds.values())[:MOST_OWN]:
            differences = [self._derivative.difference([index], f"own {index}") for index in indices]
            reached = [
                {rank for rank, own in enumerate(one.shares) if any(abs(share) > one.limit for share in own)}
                for one in differences
            ]
            shown = all(self._shows(one, index) for one, index in zip(differences, indices, strict=True))
            if shown and all(reached) and sum(map(len, reached)) == len(set().union(*reached)):
                firsts = [min(own) for own in reached]
                found += [] if self._derivative.have_one_loss(firsts) else indices
        return found

    def _norms(self) -> list[float]:
        """Return the smallest and the largest possible norm of all gradients: some may be copies or parts of others."""
        squares = [
            [sum(self._derivative.squares.get(key, 0.0) for key in instance) for instance in group.instances]
            for group in self._groups
        ]
        seen: dict[Kind, float] = {}
        parts = 0.0
        for index, (group, own) in enumerate(zip(self._groups, squares, strict=True)):
            parts += sum(own) if index in self._parts else own[0]
            key = group.kind if group.is_doubtful else Kind(f"{index}", (), 0)
            seen[key] = min(own[0], seen.get(key, math.inf))
        return [math.sqrt(sum(seen.values())), math.sqrt(parts)]

    def _read(self, seed: str) -> tuple[Reading, Difference]:
        """Return the first reading under which all gradients are right along a direction, and its difference.

        Readings that were rejected are left out. If there is none, look for a factor in all gradients if optimizers
        step copies, or if the script has changed gradients in a way that may hide one: it may have both reduced and
        clipped them. Otherwise return the first reading, or the nearest one if the script multiplies gradients.
        """
        readings = self._readings(self.known)
        for one in (one for one in readings if one not in self._rejected):
            difference = self._read_as(one, seed)
            if difference.error(self._indices) <= difference.limit:
                if abs(difference.right) > 2 * difference.limit:
                    self.known = replace(one, factor=1.0, factor_error=0.0, is_by_hand=False)
                return one, difference
        # Equal constants with equal gradients may be parts. As copies, they are right in no reading.
        varied = [index for index in self._indices if not self._is_constant(index)]
        for one in readings if 0 < len(varied) < len(self._indices) else ():
            self._derivative.read_as(one)
            difference = self._derivative.difference(varied, seed)
            if difference.error(varied) <= difference.limit < abs(difference.right) / 2:
                self.known = replace(one, factor=1.0, factor_error=0.0, is_by_hand=False)
                return one, self._derivative.difference(self._indices, seed)
        are_copies = self._derivative.are_copies
        may_have_one = self._derivative.factor is None and (are_copies or self._derivative.is_edited)
        for one in readings if may_have_one else ():
            if (scaled := self._with_factor(one)) is not None:
                # Only a trainer with copies is known to read all steps alike.
                self.known = one if are_copies else self.known
                return scaled, self._read_as(scaled, seed)
        # Single gradients may be wrong while the script multiplies all of them on purpose, or counts losses once.
        derivative = self._derivative
        has_others = derivative.by_hand != 1 or derivative.has_parts_of_losses or derivative.may_pass_on
        nearest = self._nearest(readings) if has_others else readings[0]
        return nearest, self._read_as(nearest, seed)

    def _is_constant(self, index: int) -> bool:
        return all(self._every[rank][number]["constant"] for rank, number in self._groups[index].keys)

    def _read_again(self, reading: Reading, seed: str) -> tuple[Reading, Difference] | None:
        """Return the reading to use in place of ``reading``, which a direction has refuted; None to keep it.

        Gradients barely above the noise of a direction fit several readings. If no reading fits now, the nearest one
        tells best what is wrong.
        """
        if self._is_settled:
            return None
        self._rejected.append(reading)
        other, difference = self._read(seed)
        is_right = difference.error(self._indices) <= difference.limit
        if is_right and other not in self._rejected and len(self._rejected) < MOST_READINGS:
            return other, difference
        self._is_settled = True
        nearest = self._nearest(self._readings(self.known if self._was_known else None))
        if nearest != reading:
            return nearest, self._read_as(nearest, seed)
        self._derivative.read_as(reading)
        return None

    def _readings(self, known: Reading | None) -> list[Reading]:
        readings = [
            Reading(is_sum, once, of_losses, one, derives)
            for of_losses in ((False, True) if self._derivative.may_pass_on else (False,))
            for derives in ((False, True) if self._derivative.receives_constants else (False,))
            for one in self._derivative.in_place
            for is_sum, once in self._means
        ]
        readings = [known] if known else readings
        if self._derivative.factor is not None:  # as other gradients of this step have shown it
            factor, factor_error = self._derivative.factor
            return [replace(one, factor=factor, factor_error=factor_error) for one in readings]
        if (by_hand := self._derivative.by_hand) != 1:
            readings += [
                replace(one, factor=by_hand, factor_error=self._derivative.unit, is_by_hand=True) for one in readings
            ]
        return readings

    def _nearest(self, readings: Sequence[Reading]) -> Reading:
        """Return the reading that explains most of the gradients: the first one, unless another is much nearer.

        If half of a gradient is wrong, several readings are equally near.
        """
        indices = self._indices
        found: dict[bool, list[tuple[float, float]]] = {}
        for of_losses in {one.of_losses for one in readings}:
            self._derivative.read_as(
                Reading(of_losses=of_losses, in_place=readings[0].in_place, derives=readings[0].derives)
            )
            along = [self._derivative.difference(indices, seed) for seed in OF_A_FACTOR]
            found[of_losses] = [(one.received_for(indices), one.right) for one in along]
        mean_of = self._derivative.divided_by

        def rest(reading: Reading) -> float:
            times = mean_of if reading.is_sum else self._derivative.ranks_of_a_loss if reading.once else 1.0
            factor = reading.factor * times
            return math.hypot(*(received - factor * right for received, right in found[reading.of_losses]))

        nearest = min(readings, key=rest)
        return nearest if rest(nearest) < rest(readings[0]) / 2 else readings[0]

    @property
    def _means(self) -> Sequence[tuple[bool, bool]]:
        """Whether gradients may be sums over losses, and whether a loss of several ranks may count once in a mean."""
        if self._derivative.losses == 1:
            return [(False, False)]
        once = [(False, True)] if self._derivative.has_parts_of_losses else []
        return [(False, False), *once, (True, False)]

    def _with_factor(self, reading: Reading) -> Reading | None:
        """Return the reading with the factor that all gradients share, None if they share none.

        Raises:
            NoAgreementError: gradients of copies are too small to tell.
        """
        indices = self._indices
        self._derivative.read_as(reading)
        tried = {seed: self._derivative.difference(indices, seed) for seed in OF_A_FACTOR}
        best = max(tried, key=lambda one: abs(tried[one].right) / tried[one].noise if tried[one].noise else 0.0)
        clearest = tried.pop(best)
        if abs(clearest.right) <= 2 * clearest.limit:
            if not self._derivative.are_copies:
                return None
            raise NoAgreementError(UNKNOWN_FACTOR)
        factor = clearest.received_for(indices) / clearest.right
        if factor <= 0:
            return None
        scaled = replace(reading, factor=factor, factor_error=clearest.noise / abs(clearest.right))
        self._derivative.read_as(scaled)
        others = (self._derivative.difference(indices, seed) for seed in tried)
        return scaled if all(one.error(indices) <= one.limit for one in others) else None

    def _scaled(self, reading: Reading, difference: Difference) -> Facts:
        """Return the factor in all gradients, its error bound, and the mistake it makes in one parameter's gradient."""
        largest = sorted(difference.received, key=lambda one: -abs(difference.received[one]))
        self._derivative.read_as(replace(reading, factor=1.0, factor_error=0.0))
        for index in largest[:MOST_OWN]:
            apart = self._derivative.difference([index], f"apart {index}")
            if apart.error([index]) > apart.limit:
                break
        wrong = self._wrong([index], apart)
        self._derivative.read_as(reading)
        return {"factor": reading.factor, "within": self._derivative.limit * reading.factor_error, "wrong": wrong}

    def _read_as(self, reading: Reading, seed: str) -> Difference:
        self._derivative.read_as(reading)
        return self._derivative.difference(self._indices, seed)

    def _shows(self, difference: Difference, index: int) -> bool:
        """Return whether an error as large as the gradient of a parameter would have been seen."""
        return abs(difference.received[index]) > 2 * difference.limit

    def _hides(self, difference: Difference, indices: Iterable[int]) -> bool:
        """Return whether other directions through these parameters would show none of them either.

        In 16-bit formats, the noise of a direction says little about that of the next one.
        """
        is_small = all(RARELY * difference.typical[index] <= 2 * difference.limit for index in indices)
        return is_small and not self._derivative.is_coarse

    def _named(self, indices: Iterable[int]) -> list[list[object]]:
        """Return the recorded names of parameters, each with the ranks that hold the parameter under this name."""
        named: list[list[object]] = []
        for index in indices:
            ranks: dict[str, list[int]] = {}
            for rank, number in sorted(self._groups[index].keys):
                for name in self._every[rank][number]["recorded"]:
                    ranks.setdefault(name, []).append(rank)
            named += [[name, each] for name, each in ranks.items()]
        return named

    def _apart(
        self, indices: Sequence[int], right: list[Facts], attempt: int
    ) -> tuple[list[Facts], list[int], list[int]]:
        """Find wrong parameters by halving; return what is wrong, the judged parameters, and those not reached.

        Measurements of right parameters are added to ``right``. Each ``attempt`` has its own directions, and so has
        each new try when the halves do not show the error that they show together.
        """
        wrong, judged, suspects, budget = [], [], [list(indices)], MOST_HALVES
        unresolved: dict[int, tuple[Sequence[int], Difference]] = {}
        while suspects and budget > 0:
            half = suspects.pop()  # the latest: to reach single parameters before the comparisons are used up
            middle = len(half) // 2
            parts = [half[:middle], half[middle:]] if middle else [half]
            found: list[tuple[list[int], Difference]] = []
            for tries in range(MOST_UNCONFIRMED if self._derivative.is_coarse else 1):
                for part in parts:
                    budget -= 1
                    seed = f"apart {part[0]} {len(part)}" + (f" {attempt} {tries}" if attempt or tries else "")
                    difference = self._derivative.difference(part, seed)
                    if difference.error(part) > difference.limit:
                        found.append((part, difference))
                        continue
                    right.append(self._measured(difference, part))
                    shown = [index for index in part if self._shows(difference, index)]
                    judged += [index for index in shown if not self._groups[index].is_doubtful]
                if found:
                    break
            for part, difference in found:
                if len(part) > 1:
                    suspects.append(part)
                    unresolved[len(part)] = part, difference
                elif (holders := self._holders_of_parts(part[0])) is not None:
                    self._parts.add(part[0])
                    self._beginnings.parts[self._groups[part[0]].kind] = holders
                else:
                    wrong.append(self._wrong(part, difference))
                    judged.append(part[0])
        if suspects and not wrong and not self._parts:
            wrong.append(self._wrong(*unresolved[min(unresolved)]))
        elif budget > 0:
            copies = self._wrong_copies(wrong)
            wrong += [self._wrong([index], difference) for index, difference in copies]
            judged += [index for index, _ in copies]
        return wrong, judged, [index for half in suspects for index in half]

    def _wrong_copies(self, wrong: Sequence[Facts]) -> list[tuple[int, Difference]]:
        """Return other copies of wrong parameters that are also wrong; the first direction need not show this."""
        known = {(one["name"], rank) for one in wrong for rank in one["ranks"]}
        indices = [
            index
            for index in self._indices
            if (group := self._groups[index]).is_doubtful
            and index not in self._parts
            and group.name in {name for name, _ in known}
            and not {(group.name, rank) for rank in group.ranks} & known
        ]
        found = []
        for index in indices[:MOST_OWN]:
            for number in range(MOST_ALONG_COPIES):
                difference = self._derivative.difference([index], f"copy {index} {number}")
                if difference.error([index]) > difference.limit:
                    found.append((index, difference))
                    break
        return found

    def _holders_of_parts(self, index: int) -> list[set[int]] | None:
        """Return the ranks of each part if the gradient is right for separate parts, None if it is not.

        Equal copies on ranks are then parts. Each is on one rank, or on all ranks of a process group.
        """
        group = self._groups[index]
        ranks = [{rank for rank, _ in instance} for instance in group.instances]
        for sets in self._derivative.sets_of_ranks if len(ranks) > 1 else ():
            first = next((one for one in sets if ranks[0] <= one), set())
            instances = [one for one, held in zip(group.instances, ranks, strict=True) if held <= first]
            if 0 < len(instances) < len(ranks):
                part = Group(group.kind, tuple(instances), group.size)
                difference = self._derivative.difference([index], f"one {index}", {index: part})
                if difference.error([index]) <= difference.limit:
                    return sets
        return None

    def _with_all_copies(self, index: int) -> Facts | None:
        """Measure a copy along a direction through all copies; ``own`` has the terms of S along this copy alone.

        Uses a direction along which the two differ, if one is found. Returns None if there are no copies.
        """
        group = self._groups[index]
        if not group.is_doubtful:
            return None
        others = (one.instances for one in self._groups if one.kind == group.kind and one is not group)
        every = Group(group.kind, (*group.instances, *(each for one in others for each in one)), group.size)
        copies = len(every.instances) / len(group.instances)
        found: list[tuple[float, Facts]] = []
        for number in range(MOST_ALONG_COPIES):
            seed = f"copies {index}" + (f" {number}" if number else "")
            together = self._derivative.difference([index], seed, {index: every})
            own = self._derivative.difference([index], seed)
            noise = math.hypot(together.noise, own.noise)
            apart = abs(together.right - copies * own.right) / (copies * noise) if noise else math.inf
            found.append((apart, {**self._measured(together, [index]), "own": own.shares, "noise": noise}))
            if apart > 2 * self._derivative.limit:
                break
        return max(found, key=lambda one: one[0])[1]

    def _wrong(self, indices: Sequence[int], difference: Difference) -> Facts:
        """Return what is wrong with a parameter, or with several; the first of ``indices`` gives the name.

        ``again`` is measured along another direction, which shows whether there is a common factor.
        """
        index = indices[0]
        group = self._groups[index]
        rank, number = min(group.keys)
        first = self._every[rank][number]
        is_one = len(indices) == 1
        again = self._derivative.difference(indices, f"again {index}")
        return {
            **self._measured(difference, indices),
            "name": group.name,
            "ranks": group.ranks,
            "right": difference.right,
            "again": [[again.received_for(indices), again.right, again.noise]],
            "began_alike": is_one and group.is_doubtful,
            "copies": sum(len(one.instances) for one in self._groups if one.kind == group.kind) / len(group.instances),
            "with_all_copies": self._with_all_copies(index) if is_one else None,
            "one_gradient": is_one
            and have_one_gradient(self._every, self._groups, index, self._derivative.unit, self._beginnings),
            "parts": self._parts_of(index) if is_one else [],
            "in_pieces": "pieces" in first,
        }

    def _parts_of(self, index: int) -> list[list[float]]:
        """Return what each rank received for its part, what is right according to the rank's own loss, and the noise.

        For pieces of parameter copies, all losses count. The list is empty if ranks hold no parts, or a rank has no
        loss.
        """
        group = self._groups[index]
        held = {rank: self._every[rank][number] for rank, number in group.instances[0]}
        are_parts = all(one["copies"] < len(one["ranks"]) for one in held.values())
        if not are_parts or self._derivative.losses < len(self._every):
            return []
        parts: list[list[float]] = []
        for position, (rank, _) in enumerate(group.instances[0]):
            in_pieces = "pieces" in held[rank]
            # Ranks compute with all pieces of their copy, and those at the same position with parts of one model.
            ranks = {instance[position][0] for instance in group.instances} if in_pieces else {rank}
            one = self._derivative.difference([index], f"part {rank}", part_of=ranks)
            own = one.right if in_pieces else math.fsum(one.shares[rank])
            parts.append([one.received[index] * held[rank]["copies"], own, one.noise])
        return parts

    def _measured(self, difference: Difference, indices: Iterable[int]) -> Facts:
        """Return what was received for these parameters together, and what may explain it.

        ``left_in_parts`` counts only parameters with a single copy, on one rank or in parts on several.
        """
        parts = [index for index in indices if len(self._groups[index].instances) == 1]
        return {
            "received": difference.received_for(indices),
            "left": sum(difference.left[index] for index in indices),
            "left_in_parts": sum(difference.left[index] for index in parts),
            "shares": difference.shares,
            "noise": difference.noise,
        }
