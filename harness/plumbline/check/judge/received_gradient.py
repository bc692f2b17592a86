"""One rank's received gradient at one step, compared with combinations of local gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from plumbline.check.evidence.training import BackwardPass, Parameter, RecordedStep
from plumbline.judge.hypothesis import Match
from plumbline.judge.oracle.noise import PROJECTION_MARGIN, UNDERFLOW, Deviation, coarsest_unit, sum_bound
from plumbline.judge.truth import RIGHT, Combination, GradientCase, SomeParameters, Weight


@dataclass(frozen=True)
class Fit:
    """How well a combination fits.

    ``ratio``: the largest error of a parameter, divided by its rounding bound. ``factor``: the common factor.
    ``worst``: the index of the parameter with the largest error.
    """

    ratio: float
    factor: float
    worst: int

    @property
    def holds(self) -> bool:
        """Whether rounding explains the difference in every parameter."""
        return self.ratio <= PROJECTION_MARGIN


@dataclass(frozen=True, eq=False)
class ReceivedGradient(GradientCase):
    """The gradient that one rank's optimizer received at one step.

    ``ranks``: this step as each rank recorded it. ``previous``: the optimizer's previous step, None at the first one.
    ``accumulate``: the largest number of backward passes in any of the optimizer's steps. ``free_factor``: clipping may
    have shortened the gradient by one factor. ``hook_format``: the format to which a communication hook rounds
    gradients, "" without one. ``parts``: names of parameters of which each rank holds a different part, so that it is
    unknown how their gradients belong together. ``factor``: the ratio of all wrong gradients to the right ones.
    ``divisor``: the number by which the script divides sums over ranks, None if it is the number of ranks.
    ``measured``: the optimizer's last step before this one whose gradients were recomputed, None without one.
    """

    limit = PROJECTION_MARGIN

    index: int
    rank: int
    ranks: Mapping[int, RecordedStep]
    previous: ReceivedGradient | None = None
    accumulate: int = 1
    free_factor: bool = False
    hook_format: str = ""
    parts: frozenset[str] = frozenset()
    factor: float = 1.0
    divisor: float | None = None
    measured: ReceivedGradient | None = None

    @property
    def step(self) -> RecordedStep:
        return self.ranks[self.rank]

    @property
    def location(self) -> str:
        """The optimizer's own step number, and the rank, in words."""
        return f"step {self.step.number}" + (f" on rank {self.rank}" if self.world > 1 else "")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the optimizer, in its order."""
        return self.step.parameters

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def micro_batches(self) -> int:
        """The number of backward passes of this rank."""
        return len(self.step.passes)

    @property
    def scales(self) -> Sequence[float | None]:
        return [step.passes[-1].scale if step.passes else None for _, step in sorted(self.ranks.items())]

    @property
    def has_shares(self) -> Sequence[bool]:
        return [bool(step.passes) for _, step in sorted(self.ranks.items())]

    @property
    def has_earlier_step(self) -> bool:
        return self.previous is not None

    @property
    def zeros(self) -> Sequence[bool]:
        return [not bool(norm) for norm in self.norms(self.received)]

    @cached_property
    def received(self) -> Tensor:
        """The gradient that the optimizer received, before clipping. Parameters without a gradient count as zero."""
        return _zero_where_missing(self.step.before_clipping)

    @property
    def left(self) -> Tensor:
        """What the step leaves in the gradients if nothing zeroes them: what the optimizer received, after clipping."""
        return _zero_where_missing(self.step.received)

    @cached_property
    def covered(self) -> Tensor:
        """For each parameter, whether a backward pass of any rank reached it, or the received gradient is zero.

        Excluded are guessed parameters, those in ``parts``, and those whose gradient the script removed. The latter do
        not move, which is how scripts freeze parameters for a while.
        """
        return (self._arrived | (self.norms(self.received) == 0)) & ~self.removed & ~self._left_out

    @cached_property
    def removed(self) -> Tensor:
        """For each parameter, whether every rank set its gradient to None before the step, but not all gradients.

        If FSDP2 was told to hold gradients back, they are not removed but missing.
        """
        if self.is_held_back:
            return self.zero > 0
        none = [[bool(part.isnan().all()) for part in one.parts(one.received)] for one in self.ranks.values()]
        everywhere = torch.tensor(none, dtype=torch.bool).reshape(len(none), len(self.parameters)).all(0)
        return everywhere & self._arrived & ~everywhere.all()

    @property
    def is_held_back(self) -> bool:
        """Whether FSDP2 was told not to reduce the gradients of some part of the model when the optimizer stepped."""
        return any(step.noted("parallelism").get("held_back") for step in self.ranks.values())

    @cached_property
    def _arrived(self) -> Tensor:
        passes = [one for step in self.ranks.values() for one in _all(step)]
        return (torch.stack([self.norms(one.local) for one in passes] or [self.zero]) > 0).any(0)

    @property
    def _left_out(self) -> Tensor:
        return torch.tensor([one.guessed or one.name in self.parts for one in self.parameters], dtype=torch.bool)

    @property
    def zero(self) -> Tensor:
        return torch.zeros(len(self.parameters), dtype=torch.float64)

    @property
    def is_finite(self) -> bool:
        return all(
            bool(v.isfinite().all()) for v in [self.received, *(o.local for s in self.ranks.values() for o in s.passes)]
        )

    @property
    def compared(self) -> Tensor:
        """For each parameter, whether its gradient is compared with a nonzero one, so that it could have differed."""
        return self._arrived & ~self.removed & ~self._left_out

    @property
    def is_zero(self) -> bool:
        return bool(self.step.received.isfinite().any()) and not bool(self.received.any())

    def norms(self, vector: Tensor) -> Tensor:
        """Return the norm of each parameter's segment, its part of a vector."""
        return self.step.norms(vector)

    def exact(self, combination: Combination) -> Tensor | None:
        """Return a combination of this step's exact gradients, NaN for parameters without one.

        None unless every backward pass has exact gradients.
        """
        shares = list(self._shares(combination.weight))
        parts = [weight * one.exact for _, weight, one in shares if one.exact is not None]
        return sum(parts, torch.zeros_like(self.received)) if parts and len(parts) == len(shares) else None

    def value(self, combination: Combination) -> Tensor:
        total = torch.zeros_like(self.received)
        for _, weight, one in self._shares(combination.weight):
            if weight:
                total = total + weight * one.local
        if self.previous is not None and combination.earlier is not None:
            total = total + self.previous.value(Combination(combination.earlier))
        if self.previous is not None and combination.left_over:
            total = total + combination.left_over * self.previous.left
        return total

    def bound(self, combination: Combination) -> Tensor:
        """Return a bound on the rounding error of each parameter in a combination of local gradients."""
        count = 3 + sum(1 + len(step.passes) for step in self.ranks.values())
        return sum_bound(count, self.units, self._sizes(combination), self._underflow(combination.weight))

    def _sizes(self, combination: Combination) -> Tensor:
        """Return the sum of the norms of what a combination adds, for each parameter."""
        total = self.zero
        for _, weight, one in self._shares(combination.weight):
            if weight:
                total = total + abs(weight) * self.norms(one.local)
        if self.previous is not None and combination.earlier is not None:
            total = total + self.previous._sizes(Combination(combination.earlier))
        if self.previous is not None and combination.left_over:
            total = total + abs(combination.left_over) * self.norms(self.previous.left)
        return total

    def _shares(self, weight: Weight) -> Iterator[tuple[int, float, BackwardPass]]:
        """Yield each rank and backward pass with the factor of that pass. The right weight of a pass is 1."""
        for rank, step in self.ranks.items():
            for index, one in enumerate(step.passes):
                yield rank, weight(rank, index, len(step.passes)) / (self.divisor or self.world) / one.scale, one

    @cached_property
    def units(self) -> Tensor:
        """The unit roundoff of each parameter's gradient, in the coarsest format that it passes through."""
        coarsest = [coarsest_unit(self._formats(one)) for one in self.parameters]
        return torch.tensor(coarsest, dtype=torch.float64)

    def _formats(self, parameter: Parameter) -> list[str]:
        return [one for one in (parameter.dtype, parameter.reduced, self.hook_format) if one]

    def _underflow(self, weight: Weight) -> Tensor:
        """Return for each parameter the underflow part of one rounding of its gradient on every rank, as a norm."""
        largest = dict.fromkeys(self.ranks, 0.0)
        for rank, factor, _ in self._shares(weight):
            largest[rank] = max(largest[rank], abs(factor))
        constants = [max(UNDERFLOW.get(dtype, 0.0) for dtype in self._formats(one)) for one in self.parameters]
        entries = [one.entries for one in self.parameters]
        return (
            sum(largest.values())
            * torch.tensor(constants, dtype=torch.float64)
            * torch.tensor(entries, dtype=torch.float64).sqrt()
        )

    def fit(self, combination: Combination) -> Fit:
        """Compare a combination with the received gradient, up to a common factor if ``free_factor`` is set."""
        ratios, factor = self.errors(combination)
        worst = int(ratios.argmax()) if len(ratios) else 0
        return Fit(float(ratios[worst]) if len(ratios) else 0.0, factor, worst)

    def fit_of_a_multiple(self) -> Fit:
        """Return which multiple of the right gradient was received, and how well it fits."""
        return replace(self, free_factor=True).fit(RIGHT)

    @property
    def is_right_to_16_bits(self) -> bool:
        """Whether optimizers hold copies of the parameters, and rounding to 16 bits explains the difference."""
        is_copied = any(one.held_in is not None for one in self.parameters)
        return is_copied and replace(self, hook_format="bfloat16").fit(RIGHT).holds

    def misfits(self, prediction: Combination | SomeParameters | Match) -> Iterator[float]:
        """Yield the largest distance of a parameter from a prediction, in rounding bounds; NaN counts as infinite.

        The previous step may have overflowed.
        """
        if isinstance(prediction, Match):
            yield 0.0
            return
        if isinstance(prediction, Combination):
            misfit = self.fit(prediction).ratio
        else:
            misfit = float(self.errors(RIGHT)[0].minimum(self.errors(prediction.combination)[0]).max())
        yield math.inf if math.isnan(misfit) else misfit

    def errors(self, combination: Combination) -> tuple[Tensor, float]:
        """Return each covered parameter's error over its bound, 0 for the others, and the common factor."""
        value, bound = self.value(combination), self.bound(combination)
        factor = 1.0
        if self.free_factor:
            square = float(value @ value)
            factor = max(0.0, float(self.received @ value) / square) if square else 1.0
        error = self.norms(self.received - factor * value) * self.covered
        ratio = error / (factor * bound).clamp_min(torch.finfo(torch.float64).tiny)
        return torch.where(error > 0, ratio, self.zero), factor

    def _rounding(self, value: Tensor, exact: Tensor | None) -> Tensor:
        """Return the distance of each parameter's combined gradient from the exact one, 0 where it is unknown."""
        if exact is None and self.measured is not None:
            before = self.measured.value(RIGHT)
            apart, size = self.measured._rounding(before, self.measured.exact(RIGHT)), self.norms(before)
            return torch.where(size > 0, apart / size, self.zero) * self.norms(value)
        return self.zero if exact is None else self.norms(value - torch.where(exact.isnan(), value, exact))

    def in_noise(self, combination: Combination, factor: float, only: int | None = None) -> Deviation | None:
        """Return the error of all covered parameters together, or of parameter ``only``; None without any noise.

        Noise has two parts: the distance between the local gradients and the exact ones, combined in the same way, and
        one rounding for each addition on the way to the optimizer. The roundings are taken to be independent. If no
        exact gradients are known, the first part is as large as in the last step with some, relative to the gradient. A
        communication hook rounds each rank's gradient first. The limit is the largest error that ``fit`` accepts as
        rounding. ``fit`` bounds the distance from the local gradients, while the error is the distance from the exact
        ones, so the limit adds the distance between the two.
        """
        value, exact = self.value(combination), self.exact(combination)
        target = value if exact is None else torch.where(exact.isnan(), value, exact)
        error = self.norms(self.received - factor * target)
        additions = sum(len(step.passes) for step in self.ranks.values())
        roundings = [self._rounding(value, exact), additions**0.5 * self.units * self.norms(value)]
        if self.hook_format:
            roundings.append(self._underflow(combination.weight))
            roundings += [abs(w) * self.units * self.norms(one.local) for _, w, one in self._shares(combination.weight)]
        noise = factor * torch.stack(roundings).norm(dim=0)
        bound = factor * (PROJECTION_MARGIN * self.bound(combination) + self.norms(value - target))
        counted = self.covered.double()
        if only is not None:
            counted = counted * (torch.arange(len(counted)) == only)
        together, largest, total = (float((each * counted).norm()) for each in (error, bound, noise))
        if not total:
            return None
        name = None if only is None else self.parameters[only].name
        return Deviation(together / total, self.step.number, name, self.rank, largest / total)


def _all(step: RecordedStep) -> Sequence[BackwardPass]:
    return (*step.passes, *step.other_passes)


def _zero_where_missing(vector: Tensor) -> Tensor:
    return torch.where(vector.isnan(), 0.0, vector)
