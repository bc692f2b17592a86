"""Whole trainings on one device, from the job's weights to the end, independent of the subject's weights in between."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial

import torch
from torch import Tensor

from plumbline.evidence.trace import Tensors
from plumbline.judge.oracle.layout import Layout, shuffled, single_batch_layout
from plumbline.judge.oracle.noise import PartialSums, distance, limit, norm, nudged, rounding_unit, within_a_rounding
from plumbline.judge.oracle.oracle import Oracle, without_held_back
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis

TRAINING_RUNS = 4
"""Whole trainings in the cell's precision that measure the noise; each costs as much as the cell itself."""


class FullTraining:
    """One device's trainings with the samples that the subject used; each is run once, and only if it is needed."""

    def __init__(self, recorded: TraceAnalysis) -> None:
        self._recorded = recorded
        self.limit = limit(TRAINING_RUNS)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each step under the contract, or one device's if results are equal: it needs only one pass."""
        layouts = tuple(self._recorded.layouts.values())
        return tuple(map(self._recorded.one_device, layouts)) if self._is_one_device else layouts

    @cached_property
    def _is_one_device(self) -> bool:
        """Whether the contract is what one device computes, at every step, within thousands of float64's roundings."""
        return all(
            sum(distance(expected.contract[name], value) for name, value in expected.whole.items())
            <= 1e-12 * sum(map(norm, expected.whole.values()))
            for expected in self._recorded.expected.values()
        )

    @cached_property
    def contract(self) -> Tensors:
        """The final weights that the backend promises, in float64."""
        return self.end(self.layouts)

    @cached_property
    def one_device(self) -> dict[tuple[Layout, ...], Tensors]:
        """The final weights of one device in float64, by its layouts: a window's batches one by one, or at once."""
        ways = {tuple(map(way, self.layouts)) for way in (self._recorded.one_device, single_batch_layout)}
        return {way: self.contract if way == self.layouts else self.end(way) for way in ways}

    @cached_property
    def noise(self) -> dict[str, float]:
        """The difference between final weights that rounding alone explains, by name.

        Adam takes a full step even if only rounding is left of a gradient. Samples can cancel out in one layout but not
        in another, so each layout that gives different weights is measured.
        """
        ways = {} if self._is_one_device else self.one_device
        measured = [self._noise_of(layouts, end) for layouts, end in {**ways, self.layouts: self.contract}.items()]
        moved = self._moved_by_tolerated_errors()
        return {name: max(noise[name] for noise in measured) + moved[name] / self.limit for name in self.contract}

    def _moved_by_tolerated_errors(self) -> dict[str, float]:
        """Return how far the final weights move if gradients have errors that still count as right.

        A few runs can miss the effect of rounding on an entry whose gradient nearly cancels out, although Adam takes a
        whole step there. So each entry that is not zero is moved by its share of the error, to one side in one training
        and to the other side in another. The larger difference counts.
        """
        differences = []
        for side in (1, -1):
            generator = torch.Generator().manual_seed(self._recorded.workload.seed)
            moved = partial(self._with_tolerated_errors, generator=generator, side=side)
            end = self._train(self._recorded.oracle, self.layouts, erring=moved)
            differences.append({name: (value.double() - self.contract[name]).abs() for name, value in end.items()})
        far = {name: norm(torch.maximum(*(one[name] for one in differences))) for name in self.contract}
        return {name: value if math.isfinite(value) else 0.0 for name, value in far.items()}  # one may diverge

    def _with_tolerated_errors(
        self, step: GlobalStep, gradient: Tensors, generator: torch.Generator, side: int
    ) -> dict[str, Tensor]:
        units, noise = self._recorded.expected[step.index].units, self._recorded.noise
        errors = {name: noise.limit * noise.at(name, unit) for name, unit in units.items()}
        moved = {}
        for name, value in gradient.items():
            entries = value != 0  # nothing is added up in the others
            share = errors.get(name, 0.0) / max(float(entries.sum()), 1.0) ** 0.5
            signs = torch.randn(value.shape, generator=generator).sign()
            moved[name] = value + side * share * signs * entries
        return moved

    def _noise_of(self, layouts: Sequence[Layout], end: Tensors) -> dict[str, float]:
        """Return the noise of a training with these layouts, which ends with these weights in float64.

        A few samples have few orders, which may hardly round at all. So every second run starts from weights less than
        one rounding away, and is compared with float64 at the same weights. Float64 is measured against itself: each
        step's weights are nudged by one rounding.
        """
        recorded = self._recorded
        rng = random.Random(recorded.workload.seed)
        is_double = recorded.cell_oracle.dtype is torch.float64
        nudges = torch.Generator().manual_seed(recorded.workload.seed)
        errors: dict[str, list[float]] = {name: [] for name in end}
        for run in range(TRAINING_RUNS):
            orders = [shuffled(layout, rng) for layout in layouts]
            moved: Callable[[Tensors], Tensors] | None = partial(nudged, generator=nudges) if is_double else None
            exact = end
            if run % 2 and not is_double:
                exact = self._train(recorded.oracle, layouts, moved=self._within_a_rounding(run))
                moved = self._within_a_rounding(run)
            for name, value in self._train(recorded.cell_oracle, orders, parts=1 + run, moved=moved).items():
                errors[name].append(distance(value, exact[name]))
        return {
            name: max([self._unit(name, weight), *filter(math.isfinite, errors[name])]) for name, weight in end.items()
        }

    def _unit(self, name: str, end: Tensor) -> float:
        """Return one rounding of a weight, and in 16 bits one of the distance that it moved.

        Sums of small dyadic numbers may need no rounding in the orders that were tried, but one in another order.
        """
        moved = end - self._recorded.start[name].double()
        return rounding_unit([end], self._recorded.weight_epsilon) + rounding_unit(
            [moved], self._recorded.compute_epsilon
        )

    def _within_a_rounding(self, seed: int) -> Callable[[Tensors], Tensors]:
        """Return a function that moves weights by less than a rounding, to numbers that the cell's precision has."""
        generator, dtype = torch.Generator().manual_seed(seed), self._recorded.cell_oracle.dtype

        def moved(weights: Tensors) -> Tensors:
            near = within_a_rounding(weights, generator, self._recorded.compute_epsilon)
            return {name: value.to(dtype) for name, value in near.items()}

        return moved

    def end(self, layouts: Sequence[Layout]) -> Tensors:
        return self._train(self._recorded.oracle, layouts)

    def _train(
        self,
        oracle: Oracle,
        layouts: Sequence[Layout],
        parts: int | None = None,
        moved: Callable[[Tensors], Tensors] | None = None,
        erring: Callable[[GlobalStep, Tensors], Tensors] | None = None,
    ) -> Tensors:
        """Return the final weights.

        The optimizer's matrix products are summed in ``parts``, if given. ``moved`` changes the weights at which
        gradients are taken, and ``erring`` changes the gradients.
        """
        oracle.load(self._recorded.start)
        optimizer = oracle.optimizer()
        schedule = oracle.schedule(optimizer)
        for step, layout in zip(self._recorded.steps_taken, layouts, strict=True):
            self._recorded.load_inputs(oracle, step)
            begun = oracle.weights()
            for names in step.ranks[0].turns or (tuple(oracle.parameters),):
                now = oracle.weights()
                at = begun if step.ranks[0].turns else now
                oracle.load(at if moved is None else moved(at))
                if step.ranks[0].turns:
                    oracle.set_turn(names, now, batches_between=self._recorded.batches_between(step))
                gradient = oracle.gradient(layout, step.ranks[0].scale or 1.0)
                gradient = without_held_back(gradient, step.held_back, self._recorded.workload.clip_norm)
                gradient = gradient if erring is None else erring(step, gradient)
                oracle.load(now)
                oracle.set_gradients({name: gradient[name] for name in names if name in gradient})
                with nullcontext() if parts is None else PartialSums(parts):
                    optimizer.step()
            schedule(self._recorded.standing_schedules(step))
        return oracle.weights()
