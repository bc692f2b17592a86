"""Common factors of gradients in the joint forward: which steps were only clipped, and by which norms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plumbline.check.evidence.training import Facts, RecordedStep
from plumbline.check.judge.clipped_masters import OBSERVER as MASTERS
from plumbline.check.judge.clipped_masters import SAME_LENGTH, are_clipped, are_one
from plumbline.check.judge.model_parts import OBSERVER


@dataclass(frozen=True)
class ScaledStep:
    """A step whose gradients are right up to one factor, which is known up to a relative error of ``within``.

    ``norms`` are the smallest and the largest possible norm of the gradients of ``parameters`` parameters. ``limit`` is
    the clipping limit of the trainer that steps the optimizer, None if the trainer does not state one.
    """

    factor: float
    norms: Sequence[float]
    limit: float | None
    parameters: int
    within: float

    @property
    def is_at_the_limit(self) -> bool:
        """Whether the norm of the gradients is the trainer's limit."""
        return self.limit is not None and any(are_one([norm, self.limit]) for norm in self.norms)


def factor_in(step: RecordedStep) -> float | None:
    """Return the common factor of a step's gradients that the joint forward shows, None if it shows none."""
    scaled = (step.facts.get(OBSERVER) or {}).get("scaled")
    return None if scaled is None else float(scaled["factor"])


def without_loss_scale(found: Facts, scale: float) -> Facts:
    """Return the joint forward's facts of a step, corrected for a loss scale by which gradients were divided."""
    scaled = found["scaled"]
    factor = scaled["factor"] * scale
    others = {key: value for key, value in found.items() if key != "scaled"}
    if abs(factor - 1) <= scaled["within"]:
        return others
    wrong = dict(scaled["wrong"])
    wrong |= {key: wrong[key] * scale for key in ("received", "left", "left_in_parts") if key in wrong}
    wrong["again"] = [[received * scale, right, noise] for received, right, noise in wrong["again"]]
    return {**others, "scaled": {**scaled, "factor": factor, "wrong": wrong}}


def scaled_by_mistake(steps: Sequence[RecordedStep]) -> Mapping[int, Facts]:
    """Return, by step number, what is wrong in steps whose common factor does not come from clipping.

    Clipped gradients have the trainer's limit as norm, however often they counted before, or are shorter than right
    ones and have the same norm at several steps. At the first step, the parameters of some optimizers may be unknown,
    so the norm of the others may be smaller.
    """
    scaled = _scaled_steps(steps)
    most = max((one.parameters for one in scaled.values()), default=0)
    shorter = [one for one in scaled.values() if one.factor < 1 - SAME_LENGTH and one.parameters == most]
    factors, within = [one.factor for one in shorter], 2 * max((one.within for one in shorter), default=0.0)
    is_one_norm = any(are_clipped([one.norms[place] for one in shorter], factors, within) for place in (0, 1))
    length = max((one.norms[1] for one in shorter), default=0.0) * (1 + SAME_LENGTH)
    counted = {number for number, one in scaled.items() if one.parameters == most or number == min(scaled)}
    shortened = {number for number in counted if scaled[number].factor < 1 and scaled[number].norms[0] <= length}
    clipped = {number for number, one in scaled.items() if one.is_at_the_limit or (is_one_norm and number in shortened)}
    return {
        step.number: step.facts[OBSERVER]["scaled"]["wrong"]
        for step in steps
        if factor_in(step) is not None and step.number not in clipped
    }


def _scaled_steps(steps: Sequence[RecordedStep]) -> Mapping[int, ScaledStep]:
    """Return the steps by number. Of several steps with one number, the last one has the norms of all parts."""
    found = {}
    for step in steps:
        if (factor := factor_in(step)) is not None:
            limit = (step.facts.get(MASTERS) or {}).get("limit")
            joint = step.facts[OBSERVER]
            found[step.number] = ScaledStep(
                factor, joint["norms"], limit, joint["parameters"], joint["scaled"]["within"]
            )
    return found


def are_clipped_apart(found: Facts, lengths: Sequence[float]) -> bool:
    """Return whether groups of ranks scaled the gradients of their parts to one norm, each by its own factor.

    ``lengths`` are the norms of what each rank's optimizers received. Copies of whole parameters are left out, because
    ``found`` does not say what each of them should receive.
    """
    limit = found["limit"]
    if any(abs(one["received"]) > 2 * limit * one["noise"] for one in found["right"]):
        return False
    factors: dict[int, tuple[float, float]] = {}
    for one in found["wrong"]:
        directions = [(one["received"], one["right"], one["noise"]), *map(tuple, one["again"])]
        received, right, noise = max(directions, key=lambda each: abs(each[1]) / each[2])
        within = limit * noise / abs(right) if right else math.inf
        if one["began_alike"] or within > SAME_LENGTH:
            continue
        for rank in one["ranks"]:
            known, least = factors.get(rank, (received / right, within))
            if abs(received / right - known) > within + least:
                return False
            factors[rank] = known, max(within, least)
    groups: list[list[int]] = []
    for rank, (factor, within) in factors.items():
        alike = [one for one in groups if abs(factors[one[0]][0] - factor) <= within + factors[one[0]][1]]
        if not alike:
            groups.append([])
        (alike or groups)[-1].append(rank)
    return (
        len(factors) == len(lengths)
        and len(groups) > 1
        and all(0 < factor < 1 for factor, _ in factors.values())
        and are_one([math.hypot(*(lengths[rank] for rank in one)) for one in groups])
    )
