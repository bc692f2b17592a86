"""What is right at a step, and what known mistakes would make of it, before anybody knows the gradients themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.core.cell import Cell
from harness.core.training_behavior import TrainingBehavior
from harness.evidence.trace import RankTrace, Step, Tensors, Trace
from harness.judge.causes.combinations import factor_between
from harness.judge.causes.counterfactuals import Counterfactuals
from harness.judge.causes.gradient_case import GradientCase, Pattern
from harness.judge.causes.hypothesis import OCCASIONAL
from harness.judge.causes.registry import HYPOTHESES
from harness.judge.oracle.layout import Layout
from harness.judge.oracle.noise import distance, norm
from harness.judge.oracle.oracle import Oracle, clipped, mean_gradient
from harness.judge.trace_analysis import ExpectedGradients, GlobalStep, TraceAnalysis
from harness.workloads import Problem

LIMIT = 20.0
"""Rounding explains up to so many times the error of one run in the cell's precision: one draw may be a small one."""


@dataclass(frozen=True)
class ExpectedStep:
    """What is right at one step. ``mixed`` are the parts with each rank's own at the weights that it really had.

    ``computed`` are the parts in the cell's own precision: with the roundings of autocast, which is a better idea of
    what a trainer got than the exact ones are, but no better of what it should have got.

    ``rounding`` is the error of a gradient that one run in the cell's precision makes, ``lengths`` its length and
    ``sizes`` what its entries are made of. ``thawed`` are the gradients of frozen parameters that were handed all the
    same.
    """

    truth: ExpectedGradients
    mixed: list[list[Tensors]]
    computed: list[list[Tensors]]
    rounding: dict[str, float]
    lengths: dict[str, float]
    sizes: Tensors
    thawed: Tensors

    @property
    def roundings(self) -> Tensors:
        """How large one rounding of each entry is."""
        return {n: s * (self.rounding[n] / norm(s)) for n, s in self.sizes.items() if n in self.rounding and norm(s)}


class StepContext:
    """The steps as far as they are known, as an analysis that explanations can work with."""

    def __init__(self, workload: Problem, cell: Cell, behavior: TrainingBehavior) -> None:
        self.workload = workload
        self.cell = cell
        self.analysis = TraceAnalysis(Trace(()), workload, cell, behavior)
        self.analysis.steps = ()
        self.analysis.layouts = {}
        self.analysis.expected = {}
        self._counterfactuals = Counterfactuals(self.analysis)

    def enter(self, index: int, steps: Sequence[Step], handed: Collection[str]) -> ExpectedStep | None:
        """Take up a step of which the weights before it are known; None where nothing can be computed from them.

        ``handed`` are the parameters of which an optimizer was handed a gradient.
        """
        analysis = self.analysis
        # A step that was skipped is judged by its weights alone, but its gradient must be found all the same.
        steps = [replace(step, skipped=False) for step in steps]
        ranks = tuple(RankTrace(rank, len(steps), (step,)) for rank, step in enumerate(steps))
        single = TraceAnalysis(Trace(ranks), self.workload, self.cell, analysis.behavior)
        single.oracle, single.cell_oracle = analysis.oracle, analysis.cell_oracle
        analysis.steps = (*analysis.steps[:index], GlobalStep(index, tuple(steps)))
        with suppress(Exception):  # whatever cannot be computed here, the judge's own checks will say why
            truth, layout = single.expected[0], single.layouts[0]
            analysis.expected[index], analysis.layouts[index] = truth, layout
            return _right(single, truth, handed)
        return None

    def parts(self, index: int) -> Sequence[Sequence[Tensors]]:
        """Return the gradient of each group alone at a step, by micro-batch; none where nothing is right."""
        truth = self.analysis.expected.get(index)
        return truth.parts if truth is not None else ()

    def settle(self, index: int, steps: Sequence[Step]) -> None:
        """Replace a step by what is known of it now."""
        known = self.analysis.steps
        self.analysis.steps = (*known[:index], GlobalStep(index, tuple(steps)), *known[index + 1 :])

    def predictions(self, index: int, rank: int) -> Iterator[Tensors]:
        """Yield what the known mistakes would have handed to the optimizer of a rank, as far as anything is known."""
        if not self.analysis.expected[index].raw:
            return
        case = GradientCase.of(self._counterfactuals, index, rank)
        case = replace(case, pattern=Pattern(factor_between(case.expected.raw, case.step.gradients)))
        for hypothesis in sorted(HYPOTHESES[GradientCase], key=lambda one: -one.specificity):
            if hypothesis.specificity > OCCASIONAL:
                with suppress(Exception):  # a prediction that cannot be computed is left out
                    yield from hypothesis.predict(case)

    def each_sample(self, index: int) -> list[Tensors]:
        """Return the gradient of each sample of the step alone; none where none can be alone."""
        with suppress(Exception):
            return self._counterfactuals.each_sample(index)
        return []


def _right(single: TraceAnalysis, truth: ExpectedGradients, handed: Collection[str]) -> ExpectedStep:
    (global_step,) = single.steps
    layout = single.layouts[0]
    single.load_step(single.cell_oracle, global_step)
    computed = _computed(single.cell_oracle, layout, global_step.ranks[0].scale or 1.0)
    rough = clipped(mean_gradient(computed), single.workload.clip_norm)
    rounding = {name: max(unit, distance(rough[name], truth.contract[name])) for name, unit in truth.units.items()}
    thawed_parts = _thawed(single, handed)
    sizes: Tensors = {}
    for part in (part for parts in (truth.parts, thawed_parts) for groups in parts for part in groups):
        for name, value in part.items():
            sizes[name] = sizes[name] + value.abs() if name in sizes else value.abs()
    thawed = mean_gradient(thawed_parts)
    return ExpectedStep(
        truth=truth,
        mixed=_mixed(single, truth),
        computed=computed,
        rounding={**{name: norm(sizes[name]) * single.epsilon for name in thawed}, **rounding},
        lengths={name: norm(value) for name, value in (thawed | truth.contract).items()},
        sizes=sizes,
        thawed=thawed,
    )


def _thawed(single: TraceAnalysis, handed: Collection[str]) -> list[list[Tensors]]:
    """Return the gradient of each group with respect to the frozen parameters that were handed one."""
    oracle = single.oracle
    frozen = {name: p for name, p in oracle.parameters.items() if name in handed and name not in oracle.trained}
    if not frozen:
        return []
    trained = oracle.trained
    try:
        for parameter in frozen.values():
            parameter.requires_grad_(True)
        oracle.trained = frozen
        return oracle.group_gradients(single.layouts[0])
    finally:
        oracle.trained = trained
        for parameter in frozen.values():
            parameter.requires_grad_(False)


def _computed(rough: Oracle, layout: Layout, scale: float) -> list[list[Tensors]]:
    """Return the gradient of each group alone in the precision of ``rough``, as float64, finite if any scale is."""
    while True:
        parts = rough.group_gradients(layout, scale)
        every = [value for groups in parts for part in groups for value in part.values()]
        if scale <= 1 or all(bool(value.isfinite().all()) for value in every):
            return [[{name: value.double() for name, value in part.items()} for part in groups] for groups in parts]
        scale /= 2


def _mixed(single: TraceAnalysis, truth: ExpectedGradients) -> list[list[Tensors]]:
    """Return the gradient of each group alone, at the weights of the rank that computed it."""
    (global_step,) = single.steps
    mixed = [list(groups) for groups in truth.parts]
    for rank, step in enumerate(global_step.ranks):
        if any(step.before[name] is not value for name, value in global_step.ranks[0].before.items()):
            single.load_step(single.oracle, replace(global_step, ranks=(step, *global_step.ranks)))
            for place, groups in enumerate(single.oracle.group_gradients(single.layouts[0])):
                if rank < len(groups):
                    mixed[place][rank] = groups[rank]
    return mixed


def rounding_sizes(before: Tensor, after: Tensor) -> Tensor:
    """Return how large one rounding of each entry of ``after`` is, in the precision of ``before``."""
    return (before.double().abs() + (after.double() - before.double()).abs()) * torch.finfo(before.dtype).eps / 2
