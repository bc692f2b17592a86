"""Whole trainings that run free: from the job's weights to the end, with no look at the subject's in between."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from harness.evidence.trace import Tensors
from harness.judge.oracle.layout import Layout, shuffled, whole
from harness.judge.oracle.noise import distance, rounding_unit
from harness.judge.oracle.oracle import Oracle

if TYPE_CHECKING:
    from harness.judge.trace_analysis import TraceAnalysis

TRAINING_RUNS = 4
"""Whole trainings in the cell's precision that measure the noise; each costs as much as the cell itself."""


class FullTraining:
    """One device's trainings with the samples that the subject used; each is run once, and only if it is asked for."""

    def __init__(self, analysis: TraceAnalysis) -> None:
        self.analysis = analysis

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The contract's layout of each step; one device's where that is the same: one pass, not many."""
        layouts = tuple(self.analysis.layouts.values())
        return tuple(map(whole, layouts)) if self.analysis.is_one_device else layouts

    @cached_property
    def contract(self) -> Tensors:
        """The weights at the end that the backend promises, in float64."""
        return self.end(self.layouts)

    @cached_property
    def noise(self) -> dict[str, float]:
        """What rounding alone explains of a difference between weights at the end, by name."""
        analysis = self.analysis
        rng = random.Random(analysis.workload.seed)
        rough = [
            _train(analysis.cell_oracle, analysis, [shuffled(layout, rng) for layout in self.layouts])
            for _ in range(TRAINING_RUNS)
        ]
        noise = {}
        for name, right in self.contract.items():
            # At least one rounding of the weights, and in 16 bits one of the way they went: small dyadic numbers may
            # need none in every order that was tried, and one in another.
            travelled = right - analysis.start[name].double()
            unit = rounding_unit([right], analysis.epsilon)
            unit += rounding_unit([travelled], analysis.compute_epsilon)
            errors = [distance(run[name], right) for run in rough]
            # A run that overflowed in float16 measures no rounding.
            noise[name] = max([unit, *(error for error in errors if math.isfinite(error))])
        return noise

    def end(self, layouts: Sequence[Layout]) -> Tensors:
        """Return the weights at the end in float64, where each step has its layout."""
        return _train(self.analysis.oracle, self.analysis, layouts)


def _train(oracle: Oracle, analysis: TraceAnalysis, layouts: Sequence[Layout]) -> Tensors:
    oracle.load(analysis.start)
    optimizer = oracle.optimizer()
    schedule = oracle.schedule(optimizer)
    for global_step, layout in zip(analysis.steps_taken, layouts, strict=True):
        analysis.set_forward_state(oracle, global_step)
        for names in global_step.ranks[0].turns or (tuple(oracle.parameters),):
            gradient = oracle.gradient(layout, global_step.ranks[0].scale or 1.0)
            oracle.set_gradients({name: gradient[name] for name in names if name in gradient})
            optimizer.step()
        schedule()
    return oracle.weights()
