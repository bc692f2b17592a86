"""Judges gradients against the joint forward: the forward that all ranks compute together.

The right gradient is its derivative, by central differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from plumbline.check.evidence.training import Facts, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.clipped_masters import are_clipped
from plumbline.check.judge.exchanges import relations_of_losses
from plumbline.check.judge.joint_gradient import JointGradient
from plumbline.check.judge.judged_gradients import judged_gradients
from plumbline.check.judge.loss_scales import are_clipped_apart, are_clipped_by_hand, scaled_by_mistake
from plumbline.check.judge.manual_edits import SAME_LENGTH, about_one_factor, multiplied
from plumbline.check.judge.noted import not_judged
from plumbline.check.judge.rank_weights import JOINT, LAYOUT
from plumbline.check.judge.received_gradient import ReceivedGradient
from plumbline.check.judge.step_objective import NEAR, is_loss_divided, objective_of_losses, steps_together
from plumbline.check.judge.wrong_together import (
    are_only_rounding,
    has_hidden_left_over,
    has_last_pass_apart,
    has_left_over,
)
from plumbline.core.finding import UNEXPLAINED, Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.findings import failed_with_hint
from plumbline.judge.mistakes.accumulation import PREVIOUS_STEP_NOT_ZEROED
from plumbline.judge.oracle.noise import PROJECTION_MARGIN
from plumbline.judge.truth import RIGHT, GradientEvidence, Truth, scaled
from plumbline.report.text import listed

CHECK = "gradients"

BY_ELIMINATION = ("some-tensors-scaled", "exchanged-otherwise", UNEXPLAINED)
"""Causes that are named by elimination only, and that a script's own code may intend."""

_SCALED = ", up to one common factor, which clipping explains"

_BY_HAND = "; the script multiplies gradients by a factor, as its loss requires"

_AS_REQUIRED = "; all gradients are multiplied by one factor, with which the weights of the ranks' losses add up to 1"

_CLIPPED = "; the script clips them with its own code"

_IN_PLACE = "; in-place collectives in the forward count as constants, because autograd does not see them"


class JointTruth(Truth[JointGradient]):
    """Compares what all optimizers received with the derivative of the joint forward, along random directions.

    Parameters, each by name and rank: ``judged`` were compared with a nonzero gradient. ``alike`` are equal on several
    ranks, and are right only if each is a separate part. ``doubtful`` may, in every step, be either copies of one
    parameter or parts of one. ``layers`` are equal in different pipeline stages, and count as those of different
    layers. The search for wrong ones did not reach ``unsearched``. ``perhaps_tied`` has pairs that are equal in
    different stages at the first compared step. ``unreduced`` has parameters, each with its ranks, that are replicas
    and have the gradient of one rank in every step. ``cut_off`` has those that have no gradient because a collective
    returns none in every step.
    """

    def __init__(self, training: RecordedTraining) -> None:
        self.training = training
        first = training.ranks[0]
        # All ranks have the same facts, because they exchanged them.
        found = [(step.number, step.noted(JOINT)) for step in first.steps]
        self.compared = [(number, one) for number, one in found if "judged" in one]
        wrong = {number for number, one in self.compared if one["wrong"]}
        scaled = {number: one for number, one in scaled_by_mistake(first.steps).items() if number not in wrong}
        self.multiplied = {number: self._weight(number) for number in scaled}
        self.scaled = {number: one for number, one in scaled.items() if not _is_one(self.multiplied[number])}
        self.is_sum = any(one["is_sum"] for _, one in self.compared)
        self.is_by_hand = any("by_hand" in one for _, one in self.compared)
        self.is_of_one_loss = all(one["one_loss"] for _, one in self.compared)
        self.is_of_same_losses = all(one.get("same_loss") for _, one in self.compared)
        self.ranks_of_a_loss = max((one.get("ranks_of_a_loss", 1) for _, one in self.compared), default=1)
        self.divides_again = any(one.get("divided_again") for _, one in self.compared)
        self.not_compared = sorted({rank for _, one in self.compared for rank in one.get("not_compared", ())})
        self.losses = max((one["losses"] for _, one in self.compared), default=training.world_size)
        unjudged = ((number, str(one["why"])) for number, one in found if one.get("why"))
        self.first_unjudged, self.obstacle = next(unjudged, (0, ""))
        kinds = ("judged", "layers", "alike", "doubtful", "unsearched")
        self.judged, self.layers, alike, doubtful, unsearched = map(self._members, kinds)
        self.alike, self.doubtful, self.unsearched = (one - self.judged for one in (alike, doubtful, unsearched))
        self.perhaps_tied = [pair for _, one in self.compared[:1] for pair in one["perhaps_tied"]]
        self.unreduced = _in_all([one["own"] for _, one in self.compared if not one["wrong"]])
        cut_off = _in_all([one.get("cut_off", ()) for _, one in self.compared])
        self.cut_off = [(name, own) for name, own in cut_off if not any(self._has_gradient(name, rank) for rank in own)]

    @property
    def cases(self) -> Sequence[JointGradient]:
        """The wrong gradients of the first step that has any. Later steps begin with wrong weights."""
        window = max((len(one) for _, found in self.compared for one in _passes(found)), default=1)
        for number, found in self.compared:
            wrong = [each for other, each in self.compared if other == number and each["wrong"]]
            if wrong:
                lengths = self._lengths(number)
                apart = any(are_clipped_apart(each, lengths) for each in wrong)
                apart |= are_clipped_by_hand([self._by_hand(rank, number) for rank in self.training.ranks], lengths)
                cases = [JointGradient.of(number, one, each, window) for each in wrong for one in each["wrong"]]
                # Copies that differ by more than rounding are compared one by one, and each may be right.
                if cases := [replace(case, clipped_apart=apart) for case in cases if not case.is_whole]:
                    return cases
            if number in self.scaled:
                scaled = self.scaled[number]
                return [JointGradient.of(number, scaled, {**found, "wrong": [scaled], "right": []}, window)]
        return []

    def _lengths(self, number: int) -> Sequence[float]:
        return [
            math.hypot(*(step.norm for step in rank.steps if step.number == number)) for rank in self.training.ranks
        ]

    def _by_hand(self, rank: RecordedRank, number: int) -> float | None:
        """Return the factor by which a rank's script multiplied its gradients at a step, None if unknown."""
        changes = [step.noted("clipping").get("by_hand") for step in rank.steps if step.number == number]
        factors = {1.0 if one is None else one["factor"] for one in changes}
        return factors.pop() if len(factors) == 1 else None

    def _has_gradient(self, name: str, rank: int) -> bool:
        return any(
            bool(part.nan_to_num().any())
            for step in self.training.ranks[rank].steps
            for one, part in zip(step.parameters, step.parts(step.received), strict=True)
            if one.name == name
        )

    @property
    def may_be_replicas(self) -> bool:
        """Whether a mean over all ranks may be right as well. Stages of a pipeline are never replicas of each other."""
        return self.is_sum or (bool(self.doubtful or self.alike) and not self.is_pipeline)

    @property
    def is_pipeline(self) -> bool:
        """Whether some ranks compute no loss."""
        return self.losses < self.training.world_size

    def has_judged(self, parameters: Iterable[tuple[str, int]]) -> bool:
        """Return whether any of the parameters, by name and rank, was compared with the joint forward."""
        return any(one in self.judged for one in parameters)

    def may_be_parts(self, parameters: Iterable[tuple[str, int]]) -> bool:
        """Return whether each of these parameters may be a part, as an expert, next to copies in other modules.

        In most modules, all parameters are parts, or all are copies. If nothing was compared for certain, the model has
        no known copies.
        """
        modules = {(name.rpartition(".")[0], rank) for name, rank in self.judged}
        return bool(modules) and not any((name.rpartition(".")[0], rank) in modules for name, rank in parameters)

    def has_found_right(self, parameters: Iterable[tuple[str, int]]) -> bool:
        """Return whether any of the parameters was compared with the joint forward and was not found wrong."""
        wrong = {(one["name"], rank) for _, found in self.compared for one in found["wrong"] for rank in one["ranks"]}
        return any(
            (name, rank) in self.judged and (name.partition("[")[0], rank) not in wrong for name, rank in parameters
        )

    def _members(self, kind: str) -> frozenset[tuple[str, int]]:
        return frozenset((name, rank) for _, found in self.compared for name, ranks in found[kind] for rank in ranks)

    def compare(self) -> Finding:
        limit = max(found["limit"] for _, found in self.compared)
        noise = [one for _, found in self.compared for one in found["noise"]]
        wrong = self.cases
        is_divided = is_loss_divided(self.training.ranks)
        if not wrong and has_hidden_left_over(self._measured, self.losses) and not are_only_rounding(self._measured):
            return self._not_zeroed()
        if not wrong and (unknown := self._multiplied_by_hand()) is not None:
            return unknown
        is_summed = not wrong and self.is_sum and not self.is_by_hand
        if is_summed and self.is_of_one_loss and not is_divided:
            return self._counted_by_every_rank()
        own = self.unreduced
        if is_summed and is_divided is False and not self.judged:
            # If no parameter is certainly shared, the gradient of each copy alone looks like a part of the sum.
            own = _in_all([found["doubtful"] for _, found in self.compared])
        if own:  # what is wrong at a later step may follow from that
            return self._not_averaged(own)
        if is_summed and is_divided is False:
            return self._summed()
        tied = next(((number, pair) for number, found in self.compared for pair in found["tied_apart"]), None)
        if not wrong and tied is not None:
            return self._not_added(*tied)
        if not wrong and self.cut_off:
            return self._lost(self.cut_off)
        if not wrong:
            told = "every gradient that was judged is the derivative of the forward that all ranks compute together"
            is_counted_once = self.is_of_same_losses and "part" in relations_of_losses(self.training).values()
            if self.is_sum and not is_counted_once:
                told += "; gradients are those of the sum of the ranks' losses, not of the mean"
            if self.is_by_hand:
                told += _CLIPPED if self._is_clipped_by_hand else _BY_HAND
            scaled = [number for number, found in self.compared if "scaled" in found]
            told += _SCALED if any(number not in self.multiplied for number in scaled) else ""
            told += _AS_REQUIRED if self.multiplied else ""
            if adding := sorted({name for _, found in self.compared for name in found["adds"]}):
                told += f"; the backward of {listed(adding)} adds a gradient of its own, whose size was not judged"
            told += _IN_PLACE if any(found["in_place"] for _, found in self.compared) else ""
            return Finding(CHECK, Outcome.PASSED, told, error_x_noise=max(noise, default=None), limit_x_noise=limit)
        worst = wrong[0]
        names = listed(dict.fromkeys(case.name for case in wrong))
        observed = f"gradients of {names} at step {worst.index} are not the derivative"
        if worst.index in self.scaled:
            observed = f"all gradients at step {worst.index} are {worst.common_factor:.4g} × the derivative"
        error = max(abs(one.received - sum(map(sum, one.shares))) / one.noise for one in wrong)
        return Finding(
            CHECK,
            Outcome.FAILED,
            f"{observed} of the forward that all ranks compute together",
            step=worst.index,
            parameter=worst.name,
            rank=worst.rank,
            error_x_noise=error,
            limit_x_noise=limit,
        )

    def _not_zeroed(self) -> Finding:
        """Return the failure where gradients were not zeroed, but rounding hides that in each single direction.

        Clipped gradients are small enough for that.
        """
        mistake = PREVIOUS_STEP_NOT_ZEROED
        return failed_with_hint(
            CHECK,
            f"gradients are {mistake.description}; each error alone may be rounding, but together the errors match the "
            "previous step's gradients",
            mistake.hint,
            cause=mistake.name,
            family=mistake.family,
            step=self.compared[min(1, len(self.compared) - 1)][0],
        )

    def _counted_by_every_rank(self) -> Finding:
        """Return the failure where each rank computes the same loss, and gradients are those of the sum.

        If the loss is unknown, it is not judged: it may be divided by the number of ranks.
        """
        world = self.losses
        if is_loss_divided(self.training.ranks) is None:
            return not_judged(
                CHECK,
                f"all {world} ranks compute the same loss, and gradients are {world} × its derivative. That is right "
                f"if the loss is divided by {world}, which could not be determined",
                self.compared[0][0],
            )
        return failed_with_hint(
            CHECK,
            f"all {world} ranks compute the same loss, but gradients are {world} × its derivative: it counts once per "
            "rank",
            "divide the loss by the number of ranks, or replace collectives whose backward sums equal gradients over "
            "ranks, such as torch.distributed.nn.functional.all_reduce",
            cause="multiplied-by-ranks-of-the-same-samples",
            family="loss-normalisation",
            step=self.compared[0][0],
        )

    def _summed(self) -> Finding:
        """Return the failure where gradients are those of the sum of the ranks' losses, none of which is divided."""
        return failed_with_hint(
            CHECK,
            f"gradients are the sum over {self.losses} ranks, not their mean, and no rank divides its loss",
            "divide the loss, or the gradients after their reduction, by the number of ranks",
            cause="summed-over-ranks",
            family="averaging",
            step=self.compared[0][0],
        )

    def _multiplied_by_hand(self) -> Finding | None:
        """Return why gradients that the script multiplies are not judged, None if its losses then have the weight 1."""
        if not self.is_by_hand:
            return None
        if self._is_clipped_by_hand:
            return None
        weights = [weight for number, _ in self.compared if (weight := self._weight(number)) is not None]
        if len(weights) < len(self.compared):
            weights = []
        if weights and all(map(_is_one, weights)):
            return None
        return not_judged(CHECK, multiplied(weights), self.compared[0][0])

    def _weight(self, number: int) -> float | None:
        """Return the sum of the weights of all losses in the gradients of a step, None if unknown.

        Gradients may have a common factor.
        """
        found = next(one for index, one in self.compared if index == number)
        steps = next((steps for steps in steps_together(self.training.ranks) if steps[0].number == number), None)
        objective = None if steps is None else objective_of_losses(steps)
        if objective is None or not all(share.is_alone for share in objective.shares):
            return None
        factor: float = found["scaled"]["factor"] if "scaled" in found else found.get("by_hand", 1.0)
        sums = objective.of_losses * len(objective.ranks)
        return factor * sums / float(found["divided_by"])

    @property
    def _is_clipped_by_hand(self) -> bool:
        shorter = [
            (found["by_hand"], found["norms"])
            for _, found in self.compared
            if found.get("by_hand", 1.0) < 1 - SAME_LENGTH
        ]
        factors = [factor for factor, _ in shorter]
        return any(are_clipped([norms[place] for _, norms in shorter], factors, SAME_LENGTH) for place in (0, 1))

    def _not_averaged(self, own: Sequence[tuple[str, Sequence[int]]]) -> Finding:
        """Return the failure where each replica uses and trains only its own copy of some parameters."""
        name, ranks = own[0]
        return failed_with_hint(
            CHECK,
            f"{listed(dict.fromkeys(name for name, _ in own))} started with the same values on several ranks, "
            "and each copy has the gradient of its own samples or tokens, but the copies' gradients are not reduced",
            "all-reduce the gradients of all replicated parameters",
            cause="some-parameters-not-synchronised",
            family="sync",
            step=self.compared[0][0],
            rank=ranks[0],
            parameter=name,
        )

    def _lost(self, cut_off: Sequence[tuple[str, Sequence[int]]]) -> Finding:
        """Return the failure where parameters are trained by no gradient, because a collective returns none."""
        name, ranks = cut_off[0]
        names = listed(dict.fromkeys(name for name, _ in cut_off))
        return failed_with_hint(
            CHECK,
            "collectives whose results have no gradient, such as torch.distributed.all_to_all_single, are the only way "
            f"from {names} to the loss, so no gradient reaches them",
            "communicate with a function that has a gradient, such as "
            "torch.distributed.nn.functional.all_to_all_single",
            cause="lost-on-the-way-back",
            family="sync",
            step=self.compared[0][0],
            rank=ranks[0],
            parameter=name,
        )

    def _not_added(self, step: int, pair: Sequence[tuple[str, int]]) -> Finding:
        """Return the failure where pipeline stages train copies of a tied weight, each with its own gradient."""
        (name, rank), (other, other_rank) = pair
        return failed_with_hint(
            CHECK,
            f"{name} on rank {rank} and {other} on rank {other_rank} are copies of one tied weight, but "
            "each stage updates its copy with its own part of the gradient",
            "all-reduce the gradient of a tied weight over the stages that hold it, before each step",
            cause="tied-gradients-not-added",
            family="sync",
            step=step,
            rank=rank,
            parameter=name,
        )

    def evidence(self, wrong: Sequence[JointGradient]) -> GradientEvidence[JointGradient]:
        copies = [case for case in wrong if case.began_alike]
        # Layers of different stages may also begin alike, and no part of a sum is missing in them.
        may_be_copies = [] if self.is_pipeline else self._doubtful_at(wrong[0].index)
        if len(copies) < len(wrong) and (copies or may_be_copies) and all(case.is_a_copy for case in copies):
            name = copies[0].name if copies else may_be_copies[0]
            wrong = [replace(case, own_path=name) for case in wrong]
        if any(case.one_gradient for case in wrong):  # copies may be reduced over the same ranks as different parts
            wrong = [replace(case, has_one_gradient=True) for case in wrong]
            wrong.sort(key=lambda case: not case.one_gradient)
        left = has_left_over(wrong) or has_hidden_left_over(self._measured, self.losses, is_wrong=True)
        apart = has_last_pass_apart(wrong)
        return GradientEvidence([replace(case, has_last_pass_apart=apart, has_left_over=left) for case in wrong])

    @property
    def _measured(self) -> list[Facts]:
        """All directions except those through one of several copies, whose errors may be the shares of other copies."""
        found = [one for _, step in self.compared for one in (*step["right"], *step["unconfirmed"])]
        return found + [one for _, step in self.compared for one in step["wrong"] if not one["began_alike"]]

    def _doubtful_at(self, index: int) -> list[str]:
        return [name for number, found in self.compared if number == index for name, _ in found["doubtful"]]

    def conclude(self, finding: Finding, wrong: Sequence[JointGradient]) -> Finding:
        """Withdraw a failure that the script's own code may intend."""
        # If every wrong parameter may be a copy, the only evidence is that the copies have different gradients.
        is_of_copies = finding.cause == "parts-of-a-sum" and all(case.began_alike for case in wrong)
        is_edited = any(found.get("edited") for number, found in self.compared if number == wrong[0].index)
        if is_edited and wrong[0].index in self.scaled and self.multiplied[wrong[0].index] is None:
            return not_judged(CHECK, multiplied([]), finding.step)
        if finding.cause not in BY_ELIMINATION and not is_of_copies:
            return finding
        if unrepeatable := sorted({name for _, found in self.compared for name in found.get("unrepeatable", ())}):
            why = (
                f"{listed(unrepeatable)} cannot run again alone, so it is not known whether its backward is the "
                "derivative of its forward"
            )
            return not_judged(CHECK, why, finding.step)
        if wrong[0].index in self.scaled and not is_edited:
            observed, is_shorter = self.compare(), 0 < wrong[0].common_factor < 1
            unexplained = replace(observed, cause=UNEXPLAINED)
            return about_one_factor(observed, self.training, is_one_factor=is_shorter) or unexplained
        if not _is_changed(self.training, finding.step):
            return finding
        arrived = judged_gradients(self.training).cases
        if all(_is_exchanged(self.training, arrived, case) for case in wrong):
            return finding
        why = "the script changes gradients with its own code, and the result matches no known mistake"
        return not_judged(CHECK, why, finding.step)


def _in_all(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for one in lists[0] if all(one in others for others in lists)] if lists else []


def _is_one(weight: float | None) -> bool:
    return weight is not None and abs(weight - 1) <= NEAR


def _passes(found: Facts) -> Iterator[Sequence[float]]:
    for one in found["wrong"]:
        yield from one["shares"]


def _is_changed(training: RecordedTraining, index: int | None) -> bool:
    steps = [step for step in training.steps if step.number == index]
    return any(step.noted("clipping").get("by_hand") or step.facts.get("gradient_hooks") for step in steps)


def _groups(training: RecordedTraining) -> list[Sequence[int]]:
    """Return single ranks, and the groups of neighbours and of every n-th rank that may be process groups."""
    world = training.world_size
    layouts = [rank.noted(LAYOUT) for rank in training.ranks]
    sizes = {size for one in layouts for size in (*one.get("groups", ()), *dict(one.get("dimensions", {})).values())}
    groups: list[Sequence[int]] = [[rank] for rank in range(world)]
    for size in sorted(one for one in sizes if 1 < one < world and world % one == 0):
        count = world // size
        groups += [range(one * size, (one + 1) * size) for one in range(count)]
        groups += [range(one, world, count) for one in range(count)]
    return groups


def _steps_of(training: RecordedTraining, ranks: Sequence[int]) -> Iterator[dict[int, RecordedStep]]:
    recorded = [rank for rank in training.ranks if rank.rank in ranks]
    for steps in steps_together(recorded):
        if len({tuple((one.name, one.shape) for one in step.parameters) for step in steps}) == 1:
            yield {rank.rank: step for rank, step in zip(recorded, steps, strict=True)}


def _is_exchanged(training: RecordedTraining, arrived: Sequence[ReceivedGradient], wrong: JointGradient) -> bool:
    """Return whether the script at most added a gradient up over a group of ranks, or divided it by their number."""
    own = [
        ReceivedGradient(index, rank, steps)
        for ranks in _groups(training)
        for index, steps in enumerate(_steps_of(training, ranks))
        for rank in steps
    ]
    cases = [case for case in (*own, *arrived) if case.step.number == wrong.index]
    for rank in wrong.ranks:
        fits = False
        for case in (one for one in cases if one.rank == rank):
            for number, parameter in enumerate(case.parameters):
                if parameter.name == wrong.name and bool(case.compared[number]):
                    expected = (RIGHT, scaled(case.world), scaled(case.world / training.world_size))
                    fits |= any(float(case.errors(one)[0][number]) <= PROJECTION_MARGIN for one in expected)
        if not fits:
            return False
    return True
