"""Master weights' gradients that were clipped on their way from the model: by which factor and which norm.

Trainers with master weights clip with their own code, so no clipping call is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from plumbline.check.judge.received_gradient import ReceivedGradient

OBSERVER = "masters"

SAME_LENGTH = 1e-2
"""Relative difference up to which two norms are one clipping limit, and two factors are one.

Chosen: trainers compute norms of 16-bit gradients, some of them in 16 bits.
"""

CLEARLY = 10
"""How many times further apart than the norms the factors of clipped steps are, if they are similar. Chosen."""


@dataclass(frozen=True, eq=False)
class MasterStep:
    """One step of an optimizer with copies of the model's parameters: the cases of all its parts, on all ranks."""

    cases: Sequence[ReceivedGradient]

    @property
    def limit(self) -> float | None:
        """The clipping limit of the trainer that steps the optimizer, None if the trainer does not state one."""
        limits = {case.step.facts[OBSERVER]["limit"] for case in self.cases}
        return next(iter(limits)) if len(limits) == 1 else None

    @property
    def length(self) -> float:
        """The norm of all gradients that the optimizers of all ranks received; copies of a piece count once."""
        norms: dict[tuple[int, int], float] = {}
        for case in self.cases:
            for number, norm in enumerate(case.step.facts[OBSERVER]["norms"]):
                key = case.step.optimizer, number
                norms[key] = max(norms.get(key, 0.0), norm)
        return math.hypot(*norms.values())

    @property
    def factors(self) -> Mapping[int, float]:
        """The ratio of each rank's gradients to the right ones; empty if any are not a multiple of these."""
        found: dict[int, list[float]] = {}
        for case in self.cases:
            fit = case.fit_of_a_multiple()
            if not fit.holds:
                return {}
            if case.compared.any():
                found.setdefault(case.rank, []).append(fit.factor)
        if any(not are_one(factors) for factors in found.values()):
            return {}
        return {rank: factors[0] for rank, factors in found.items()}

    @property
    def common_factor(self) -> float:
        """The factor below 1 that all gradients share which are right up to a factor; 1 if there is none."""
        fits = [case.fit_of_a_multiple() for case in self.cases if case.compared.any()]
        factors = [one.factor for one in fits if one.holds]
        return min(1.0, factors[0]) if factors and are_one(factors) else 1.0

    def own_length(self, rank: int) -> float:
        """The norm of what one rank's optimizer received."""
        return math.hypot(*(case.step.norm for case in self.cases if case.rank == rank))

    @property
    def is_clipped_by_parts(self) -> bool:
        """Whether each rank clipped what it holds to the same limit, by the norm of its own part."""
        factors = self.factors
        shorter = [rank for rank, factor in factors.items() if factor < 1 - SAME_LENGTH]
        if not shorter or are_one(list(factors.values())) or max(factors.values()) > 1 + SAME_LENGTH:
            return False
        lengths = [self.own_length(rank) for rank in shorter]
        others = [self.own_length(rank) for rank in factors if rank not in shorter]
        return are_one(lengths) and max(others, default=0.0) <= (1 + SAME_LENGTH) * max(lengths)


def are_one(values: Sequence[float]) -> bool:
    """Return whether norms, or factors, agree within ``SAME_LENGTH``."""
    return bool(values) and _spread(values) <= SAME_LENGTH


def are_clipped(lengths: Sequence[float], factors: Sequence[float], within: float = SAME_LENGTH) -> bool:
    """Return whether gradients of several steps were shortened to one norm.

    The same factor at every step is not clipping. If the factors are similar, known ``within`` a relative error, then
    the norms must agree much better.
    """
    if len(lengths) < 2 or not are_one(lengths):
        return False
    apart = _spread(factors)
    return apart > SAME_LENGTH or (apart > within and apart > CLEARLY * _spread(lengths))


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / max(values) if max(values) > 0 else 0.0


def master_steps(cases: Sequence[ReceivedGradient]) -> Iterator[MasterStep]:
    """Yield the steps of optimizers with copies of the model's parameters."""
    steps: dict[tuple[int, int], list[ReceivedGradient]] = {}
    for case in cases:
        if OBSERVER in case.step.facts:
            steps.setdefault((case.step.facts[OBSERVER]["owner"], case.step.number), []).append(case)
    yield from map(MasterStep, steps.values())


def before_clipping(cases: Sequence[ReceivedGradient]) -> list[ReceivedGradient]:
    """Return the cases with the gradients as they were before the trainer clipped them, if that is known.

    Clipped right gradients are shorter by one factor on all ranks, and have the trainer's limit as norm, or the same
    norm at several steps.
    """
    steps = list(master_steps(cases))
    known = _limit_by_lengths(steps)
    factors: dict[int, float] = {}
    for step in steps:
        limit = step.limit or known
        if limit is not None and are_one([step.length, limit]) and (factor := step.common_factor) < 1:
            factors |= {id(case): factor for case in step.cases}
        elif step.is_clipped_by_parts:
            factors |= {id(case): step.factors.get(case.rank, 1.0) for case in step.cases}
    return [_unclipped(case, factors.get(id(case), 1.0)) for case in cases]


def scale_at_clipping(wrong: Sequence[ReceivedGradient]) -> float | None:
    """Return the loss scale that gradients still contained when their trainer clipped them, None if there was none.

    Their norm equals the limit once it is multiplied by the scale.
    """
    for step in master_steps(wrong):
        scales = {one.scale for case in step.cases for one in case.step.passes}
        scale = scales.pop() if len(scales) == 1 else 1.0
        if scale > 1 and step.limit and step.common_factor < 1 and are_one([step.length * scale, step.limit]):
            return scale
    return None


def up_to_clipping(wrong: Sequence[ReceivedGradient]) -> list[ReceivedGradient]:
    """Return wrong gradients, with a free factor if their norm is the trainer's clipping limit."""
    clipped = {
        id(case)
        for step in master_steps(wrong)
        if step.limit is not None and are_one([step.length, step.limit])
        for case in step.cases
    }
    return [replace(case, free_factor=True) if id(case) in clipped else case for case in wrong]


def _limit_by_lengths(steps: Sequence[MasterStep]) -> float | None:
    shorter = [(step, factor) for step in steps if (factor := step.common_factor) < 1 - SAME_LENGTH]
    lengths, factors = [step.length for step, _ in shorter], [factor for _, factor in shorter]
    return max(lengths) if are_clipped(lengths, factors) else None


def _unclipped(case: ReceivedGradient, factor: float) -> ReceivedGradient:
    if factor in (0.0, 1.0) or case.step.unclipped is not None:
        return case
    step = replace(case.step, unclipped=case.step.received / factor)
    return replace(case, ranks={**case.ranks, case.rank: step})
