"""Whole trainings on one device, from the job's weights to the end, independent of the subject's weights in between."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch

from harness.evidence.trace import Tensors
from harness.judge.oracle.layout import Layout, shuffled
from harness.judge.oracle.noise import distance, limit, nudged, rounding_unit
from harness.judge.oracle.oracle import Oracle, without_held_back
from harness.judge.oracle.partial_sums import PartialSums
from harness.workloads import Problem

TRAINING_RUNS = 4
"""Whole trainings in the cell's precision that measure the noise; each costs as much as the cell itself."""


class TracedTraining(Protocol):
    """What is needed of a trace: the job's weights, the subject's samples at each step, and oracles to train with."""

    workload: Problem
    epsilon: float
    compute_epsilon: float

    @property
    def start(self) -> Tensors:
        """The job's initial weights."""

    @property
    def steps_taken(self) -> Sequence[Any]:
        """The steps that no rank skipped."""

    @property
    def layouts(self) -> Mapping[int, Layout]:
        """Who computed what at each step taken, by step index."""

    @property
    def is_one_device(self) -> bool:
        """Whether the contract is what one device computes."""

    @property
    def oracle(self) -> Oracle:
        """Float64, one device."""

    @property
    def cell_oracle(self) -> Oracle:
        """The cell's own precision, one device."""

    def batches_between(self, step: Any) -> int:
        """Return the number of batches of a step between which its optimizers alternate; 0: they do not."""

    def standing_schedules(self, step: Any) -> frozenset[int]:
        """Return the numbers of the optimizers whose schedules do not move on after a step that was taken."""

    def one_device(self, layout: Layout) -> Layout:
        """Return the same samples as one device takes them, each batch at once."""

    def load_inputs(self, oracle: Oracle, step: Any) -> None:
        """Give an oracle what a step's forwards depend on besides the weights."""


class FullTraining:
    """One device's trainings with the samples that the subject used; each is run once, and only if it is needed."""

    def __init__(self, recorded: TracedTraining) -> None:
        self._recorded = recorded
        self.limit = limit(TRAINING_RUNS)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The contract's layout of each step; one device's where that is the same: one pass, not many."""
        layouts = tuple(self._recorded.layouts.values())
        return tuple(map(self._recorded.one_device, layouts)) if self._recorded.is_one_device else layouts

    @cached_property
    def contract(self) -> Tensors:
        """The final weights that the backend promises, in float64."""
        return self.end(self.layouts)

    @cached_property
    def noise(self) -> dict[str, float]:
        """The difference between final weights that rounding alone explains, by name.

        Float64 is measured against itself: as for a gradient, each step's weights are nudged by one rounding, because
        other orders of whole samples do not show what rounding does inside a layer.
        """
        recorded = self._recorded
        rng = random.Random(recorded.workload.seed)
        is_double = recorded.cell_oracle.dtype is torch.float64
        nudges = torch.Generator().manual_seed(recorded.workload.seed) if is_double else None
        runs = [
            self._train(
                recorded.cell_oracle,
                [shuffled(layout, rng) for layout in self.layouts],
                parts=1 + run,
                nudges=nudges,
            )
            for run in range(TRAINING_RUNS)
        ]
        noise = {}
        for name, exact in self.contract.items():
            # At least one rounding of the weights, and in 16 bits one of the distance that they moved: small dyadic
            # numbers may need none in every order that was tried, and one in another.
            moved = exact - recorded.start[name].double()
            unit = rounding_unit([exact], recorded.epsilon) + rounding_unit([moved], recorded.compute_epsilon)
            errors = [distance(run[name], exact) for run in runs]
            # A run that overflowed in float16 measures no rounding.
            noise[name] = max([unit, *(error for error in errors if math.isfinite(error))])
        return noise

    def end(self, layouts: Sequence[Layout]) -> Tensors:
        """Return the final weights in float64, where each step has its layout."""
        return self._train(self._recorded.oracle, layouts)

    def _train(
        self,
        oracle: Oracle,
        layouts: Sequence[Layout],
        parts: int | None = None,
        nudges: torch.Generator | None = None,
    ) -> Tensors:
        """Return the final weights.

        The optimizer's matrix products are summed in ``parts``, if given; with ``nudges`` gradients are taken at
        weights that are each one rounding larger or smaller.
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
                oracle.load(at if nudges is None else nudged(at, nudges))
                if step.ranks[0].turns:
                    oracle.set_turn(names, now, batches_between=self._recorded.batches_between(step))
                gradient = oracle.gradient(layout, step.ranks[0].scale or 1.0)
                gradient = without_held_back(gradient, step.held_back, self._recorded.workload.clip_norm)
                oracle.load(now)
                oracle.set_gradients({name: gradient[name] for name in names if name in gradient})
                with nullcontext() if parts is None else PartialSums(parts):
                    optimizer.step()
            schedule(self._recorded.standing_schedules(step))
        return oracle.weights()
