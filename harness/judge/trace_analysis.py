"""What the checks share: the steps of a trace side by side, the truth for each of them, and the noise."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from harness.core.cell import Cell
from harness.core.training_behavior import ORDINARY, TrainingBehavior
from harness.evidence.trace import Step, Tensors, Trace
from harness.judge.oracle.epochs import Epochs
from harness.judge.oracle.full_training import FullTraining
from harness.judge.oracle.layout import Layout, at_once, contract_layout, shuffled, whole, with_unique_draws
from harness.judge.oracle.noise import NoiseScale, distance, largest_rounding, limit, norm, rounding_unit
from harness.judge.oracle.oracle import Oracle, clipped, mean_gradient
from harness.workloads import Workload

NOISE_RUNS = 12
"""Measurements of noise in a cell, at least: twelve put the limit below 10 × noise."""


@dataclass(frozen=True)
class ExpectedGradients:
    """What is right at one step, in float64, at the subject's own weights and samples.

    ``one_device`` are the gradients that one device may compute: of the mean over micro-batches, and of all samples
    at once. ``contract`` is what the backend promises, ``raw`` the same before it is clipped, ``parts`` the gradient
    of each group alone, by micro-batch. ``units`` is the size of one rounding of each tensor, and ``largest_units`` that
    of one rounding of its largest entry in the dtype that autocast computes in; without autocast it is empty.
    """

    one_device: tuple[Tensors, ...]
    contract: Tensors
    raw: Tensors
    parts: Sequence[Sequence[Tensors]]
    units: dict[str, float]
    largest_units: dict[str, float]

    @property
    def whole(self) -> Tensors:
        """The gradient of one device that takes the same micro-batches."""
        return self.one_device[0]


@dataclass(frozen=True)
class GlobalStep:
    """One optimizer step over all ranks. ``index`` counts attempts from 0, skipped ones included."""

    index: int
    ranks: tuple[Step, ...]

    @property
    def skipped(self) -> bool:
        """Whether any rank's GradScaler skipped the step."""
        return any(step.skipped for step in self.ranks)


class TraceAnalysis:
    """One trace under analysis. Everything expensive is computed once, and only if a check asks for it."""

    def __init__(self, trace: Trace, workload: Workload, cell: Cell, behavior: TrainingBehavior = ORDINARY) -> None:
        self.trace = trace
        self.workload = workload
        self.cell = cell
        self.behavior = behavior
        self.devices = cell.topology.devices
        self.epochs = Epochs.of(workload, behavior, self.devices)
        self.epsilon = torch.finfo(getattr(torch, cell.arithmetic.storage)).eps

    @cached_property
    def full_training(self) -> FullTraining:
        """Whole trainings from the job's weights, for what is asked of the end."""
        return FullTraining(self)

    @property
    def compute_epsilon(self) -> float:
        """The spacing of the coarsest numbers that the precision computes with."""
        arithmetic = self.cell.arithmetic
        return torch.finfo(getattr(torch, arithmetic.autocast or arithmetic.storage)).eps

    @cached_property
    def steps(self) -> tuple[GlobalStep, ...]:
        """The steps of all ranks side by side, as many as every rank took."""
        columns = zip(*(rank.steps for rank in self.trace.ranks), strict=False)
        return tuple(GlobalStep(index, steps) for index, steps in enumerate(columns))

    @cached_property
    def steps_taken(self) -> tuple[GlobalStep, ...]:
        """The steps that every rank really stepped."""
        return tuple(global_step for global_step in self.steps if not global_step.skipped)

    @cached_property
    def oracle(self) -> Oracle:
        """Float64, one device."""
        return Oracle(self.workload, self.devices)

    @cached_property
    def cell_oracle(self) -> Oracle:
        """The cell's own precision, one device."""
        return Oracle(self.workload, self.devices, self.cell.arithmetic)

    @property
    def steps_due(self) -> int:
        """How many optimizer steps the training should have."""
        return self.workload.steps(self.devices)

    @property
    def shuffles(self) -> bool:
        """Whether samples should be in another order in each epoch."""
        return self.behavior.shuffles(self.workload.shuffle)

    def load_step(self, oracle: Oracle, global_step: GlobalStep) -> None:
        """Put an oracle where the subject was before a step."""
        oracle.load(global_step.ranks[0].before)
        self.set_forward_state(oracle, global_step)
        oracle.take_turns(global_step.ranks[0])

    def set_forward_state(self, oracle: Oracle, global_step: GlobalStep) -> None:
        """Hand over what a step's forwards depend on besides the weights."""
        oracle.set_forward_state(with_unique_draws(global_step.ranks), own_buffers=self.behavior.own_buffers)

    @cached_property
    def start(self) -> Tensors:
        """The job's own weights, in the precision in which the subject gets them."""
        model = self.workload.model(self.cell_oracle.dtype)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    @cached_property
    def layouts(self) -> dict[int, Layout]:
        """Who computed what at each step taken, by step index."""
        spread = self.cell.contract.devices_per_process(self.cell.topology)
        accumulate = self.workload.accumulate
        return {
            global_step.index: contract_layout(with_unique_draws(global_step.ranks), spread, accumulate)
            for global_step in self.steps_taken
        }

    @cached_property
    def expected(self) -> dict[int, ExpectedGradients]:
        """What is right at each step taken, by step index."""
        truths = {}
        for global_step in self.steps_taken:
            layout = self.layouts[global_step.index]
            self.load_step(self.oracle, global_step)
            parts = self.oracle.group_gradients(layout)
            raw = mean_gradient(parts)
            contract = clipped(raw, self.workload.clip_norm)
            known = {layout: contract}
            for other in (whole(layout), at_once(layout)):
                if other not in known:
                    known[other] = self.oracle.gradient(other)
            truths[global_step.index] = ExpectedGradients(
                # Both ways at every step, also where they are the same: a trainer keeps to one of them.
                one_device=(known[whole(layout)], known[at_once(layout)]),
                contract=contract,
                raw=raw,
                parts=parts,
                # Clipping shortens the roundings of a gradient with it.
                units={name: self._unit(parts, name) * _ratio(contract[name], raw[name]) for name in contract},
                largest_units=self._largest_units(parts, contract, raw),
            )
        return truths

    @cached_property
    def is_one_device(self) -> bool:
        """Whether the contract is what one device computes, at every step, within thousands of float64's roundings."""
        return all(
            sum(distance(truth.contract[name], right) for name, right in truth.whole.items())
            <= 1e-12 * sum(map(norm, truth.whole.values()))
            for truth in self.expected.values()
        )

    def _unit(self, parts: Sequence[Sequence[Tensors]], name: str) -> float:
        return rounding_unit(_shares(parts, name), self.epsilon)

    def _largest_units(self, parts: Sequence[Sequence[Tensors]], contract: Tensors, raw: Tensors) -> dict[str, float]:
        if self.cell.arithmetic.autocast is None:
            return {}
        return {
            name: largest_rounding(_shares(parts, name), self.compute_epsilon) * _ratio(contract[name], raw[name])
            for name in contract
        }

    @cached_property
    def noise(self) -> NoiseScale:
        """Noise of the gradient: the contract in the cell's precision on one device, in several orders."""
        noise = NoiseScale()
        rng = random.Random(self.workload.seed)
        orders = -(-NOISE_RUNS // max(len(self.steps_taken), 1))
        for global_step in self.steps_taken:
            truth = self.expected[global_step.index]
            scale = global_step.ranks[0].scale or 1.0
            self.load_step(self.cell_oracle, global_step)
            noise.expect(truth.contract, truth.units, truth.largest_units)
            for _ in range(orders):
                measured = self.cell_oracle.gradient(shuffled(self.layouts[global_step.index], rng), scale)
                noise.add(measured, truth.contract, truth.units)
        return noise

    @cached_property
    def limit(self) -> float:
        """How many × noise a right trainer's gradient stays under."""
        return limit(max(self.noise.draws, 2))

    @cached_property
    def exact(self) -> bool:
        """Whether every divisor is a power of two, so that an exact workload must match bit for bit."""
        return (
            self.workload.exact
            and self.cell.arithmetic.autocast is None
            and all(_is_power_of_two(n) for layout in self.layouts.values() for n in _divisors(layout))
        )

    def differing_ranks(self, pick: str) -> Iterable[tuple[GlobalStep, int, Step]]:
        """Yield the steps whose ``pick`` ('before', 'gradients', 'after') has bits of its own, first rank first."""
        for global_step in self.steps_taken:
            seen: list[Tensors] = []
            for rank, step in enumerate(global_step.ranks):
                value: Tensors = getattr(step, pick)
                if not any(same(value, other) for other in seen):
                    seen.append(value)
                    yield global_step, rank, step


def same(left: Tensors, right: Tensors) -> bool:
    """Say whether two sets of tensors are the same names with the same bits (NaN equals NaN)."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name])
        or (bool(left[name].isnan().any()) and torch.equal(left[name].nan_to_num(), right[name].nan_to_num()))
        for name in left
    )


def _shares(parts: Sequence[Sequence[Tensors]], name: str) -> Iterable[Tensor]:
    """Return what each group contributes to a tensor's mean."""
    count = sum(len(groups) for groups in parts)
    return (part[name] / count for groups in parts for part in groups if name in part)


def _ratio(shorter: Tensor, longer: Tensor) -> float:
    return norm(shorter) / norm(longer) if norm(longer) else 1.0


def _divisors(layout: Layout) -> Iterable[int]:
    yield len(layout)
    for groups in layout:
        yield len(groups)
        for group in groups:
            yield sum(len(share) for share in group)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
