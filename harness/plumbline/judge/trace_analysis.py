"""One trace under analysis, with what all checks share: its steps, their expected gradients, and the noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from plumbline.core.cell import Cell
from plumbline.core.training_behavior import ORDINARY, TrainingBehavior
from plumbline.evidence.trace import Step, Tensors, Trace, same
from plumbline.evidence.training_record import StepRecord, TrainingRecord
from plumbline.judge.oracle.dropout_masks import mask_shapes
from plumbline.judge.oracle.layout import (
    Epochs,
    Layout,
    contract_layout,
    one_device_layout,
    shuffled,
    single_batch_layout,
    with_unique_draws,
)
from plumbline.judge.oracle.noise import (
    NOISE_RUNS,
    NoiseScale,
    absolute_sum,
    next_to_nothing,
    norm,
    nudged,
    rounding_alone,
    within_a_rounding,
)
from plumbline.judge.oracle.oracle import Oracle, mean_gradient, without_held_back
from plumbline.judge.replicas import as_replicas, holders_of, with_empty_steps, with_whole_models
from plumbline.workloads import Workload

_Made = TypeVar("_Made")

NUDGES = 3
"""How many weights, one rounding of float64 away, are used to tell whether a tensor is really zero."""


@dataclass(frozen=True)
class ExpectedGradients:
    """The correct gradients of one step, in float64, at the subject's own weights and samples.

    ``one_device``: what one device may compute: the mean over micro-batches, or all samples at once.
    ``contract``: what the backend promises. ``raw``: the same before it is clipped. ``parts``: the gradient of each
    group alone, by micro-batch.
    ``units``: the size of one rounding of each tensor. ``largest_units``: the size of one rounding of its largest entry
    in the dtype that autocast computes in; empty without autocast. ``rounding_alone``: tensors that are really zero,
    whose unit is zero, and how large float64's roundings make them.
    """

    one_device: tuple[Tensors, ...]
    contract: Tensors
    raw: Tensors
    parts: Sequence[Sequence[Tensors]]
    units: dict[str, float]
    largest_units: dict[str, float]
    rounding_alone: dict[str, float]

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
        return any(step.skipped for step in self.ranks)

    @property
    def held_back(self) -> frozenset[str]:
        """The parameters of the optimizers that a GradScaler skipped, if it did not skip all optimizers."""
        return frozenset(name for step in self.ranks for name in step.held_back)


class TraceAnalysis(TrainingRecord):
    """One trace under analysis. Everything expensive is computed once, and only if a check needs it."""

    def __init__(self, trace: Trace, workload: Workload, cell: Cell, behavior: TrainingBehavior = ORDINARY) -> None:
        self.whole_trace, self.cell = trace, cell
        self.replicas = cell.parallelism.replicas(cell.topology)
        self.world = len(cell.parallelism.loss_ranks(cell.topology))
        self.window = workload.accumulate * cell.parallelism.micro_batches
        self.workload = workload
        self.behavior = behavior
        self.devices = cell.topology.devices
        self.epochs = Epochs.of(workload, behavior, self.devices)
        self.epsilon = _epsilon(cell.arithmetic.storage)
        self.weight_epsilon = _epsilon(cell.arithmetic.stepped)
        self.compute_epsilon = _epsilon(cell.arithmetic.autocast or cell.arithmetic.storage)
        self._made: dict[Callable[[TraceAnalysis], Any], Any] = {}

    @cached_property
    def recorded(self) -> Trace:
        """The trace of every rank; a rank without parameters has an empty step for each step of its group."""
        return with_empty_steps(self.whole_trace, self.replicas)

    @cached_property
    def trace(self) -> Trace:
        """The trace in which ranks that hold one model together, and see the same samples, are one rank."""
        whole = with_whole_models(self.recorded, self.cell.parallelism.holders(self.cell.topology))
        return as_replicas(whole, self.replicas, self._mask_shapes())

    def _mask_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a whole model's masks, where ranks may draw parts of them."""
        steps = (step for rank in self.whole_trace.ranks for step in rank.steps)
        micro_batches = (micro for step in steps for micro in step.micro_batches)
        if all(len(group) == 1 for group in self.replicas) or not any(micro.drawn for micro in micro_batches):
            return {}
        return mask_shapes(self.workload, self.devices)

    @property
    def optimizer_steps(self) -> Iterator[StepRecord]:
        for trace in self.whole_trace.ranks:
            yield from trace.step_records

    def once(self, make: Callable[[TraceAnalysis], _Made]) -> _Made:
        """Return the result of ``make`` for this trace, which is computed only once."""
        if make not in self._made:
            self._made[make] = make(self)
        made: _Made = self._made[make]
        return made

    @cached_property
    def steps(self) -> tuple[GlobalStep, ...]:
        """The steps of all judged ranks side by side, as many as every rank has."""
        return _side_by_side(self.trace)

    @cached_property
    def recorded_steps(self) -> tuple[GlobalStep, ...]:
        """The same for every recorded rank, also if several ranks hold one model together."""
        return _side_by_side(self.recorded)

    @property
    def is_staged(self) -> bool:
        """Whether several ranks hold one model together, and are judged as one."""
        return any(len(ranks) > 1 for ranks in self.replicas)

    def recorded_together(self, index: int, rank: int) -> dict[int, Step]:
        """Return the recorded step, by rank, of each of the ranks that are judged as ``rank``."""
        ranks = self.recorded_steps[index].ranks
        return {one: ranks[one] for one in self.replicas[rank] if one < len(ranks)}

    @cached_property
    def holders(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """Which ranks hold each parameter, in the model's order; one entry for each judged rank."""
        order = {name: number for number, name in enumerate(self.oracle.parameters)}
        found = []
        for rank in range(len(self.replicas)):
            together = self.recorded_together(0, rank) if self.recorded_steps else {}
            places, ranks = holders_of(tuple(together.values())), tuple(together)
            names = sorted(places, key=lambda name: order.get(name, len(order)))
            found.append({name: tuple(ranks[place] for place in places[name]) for name in names})
        return tuple(found)

    def holder(self, rank: int, name: str | None) -> int:
        """Return the first rank that holds a parameter: its record is the one judged as that of ``rank``.

        If each rank holds the whole model, that is the rank itself.
        """
        if not self.is_staged:
            return rank
        return self.holders[rank].get(name or "", self.replicas[rank])[0]

    def judged_as(self, rank: int) -> int:
        """Return the judged rank to which a recorded rank belongs: the reverse of ``holder``."""
        return next(index for index, ranks in enumerate(self.replicas) if rank in ranks) if self.is_staged else rank

    @cached_property
    def steps_taken(self) -> tuple[GlobalStep, ...]:
        return tuple(step for step in self.steps if not step.skipped)

    @cached_property
    def oracle(self) -> Oracle:
        """The oracle in float64 on one device; with master weights, it computes with them rounded."""
        arithmetic = self.cell.arithmetic
        rounded_to = getattr(torch, arithmetic.storage) if arithmetic.masters else None
        return Oracle(self.workload, self.devices, rounded_to=rounded_to)

    @cached_property
    def cell_oracle(self) -> Oracle:
        """The oracle in the cell's own precision on one device."""
        return Oracle(self.workload, self.devices, self.cell.arithmetic)

    @property
    def steps_due(self) -> int:
        """The number of optimizer steps that the training should have."""
        return self.workload.steps(self.devices)

    def standing_schedules(self, step: GlobalStep) -> frozenset[int]:
        """Return the numbers of the optimizers whose schedules do not advance after a step that was taken.

        If an optimizer was held back in the step, each schedule may advance or not: the rates of the next step tell.
        """
        place = self.steps_taken.index(step)
        if not step.held_back or place + 1 == len(self.steps_taken):
            return frozenset()
        now, then = (self.steps_taken[one].ranks[0].learning_rates for one in (place, place + 1))
        groups = [len(one.param_groups) for one in self.oracle.optimizer().every]
        if not len(now) == len(then) == sum(groups):
            return frozenset(range(len(groups))) if now == then else frozenset()
        ends = list(accumulate(groups))
        return frozenset(
            number
            for number, (end, count) in enumerate(zip(ends, groups, strict=True))
            if now[end - count : end] == then[end - count : end]
        )

    @property
    def shuffles(self) -> bool:
        """Whether samples should be in another order in each epoch."""
        return self.behavior.shuffles(self.workload.shuffle)

    def batches_between(self, step: GlobalStep) -> int:
        """Return the number of batches of a step between which its optimizers alternate; 0: they do not."""
        first = step.ranks[0]
        return max(1, len(first.micro_batches) // self.cell.parallelism.micro_batches) if first.alternate else 0

    def load_step(self, oracle: Oracle, step: GlobalStep) -> None:
        """Give an oracle the state that the subject had before a step."""
        oracle.load(step.ranks[0].before)
        self.load_inputs(oracle, step)
        oracle.set_turns(step.ranks[0], self.batches_between(step))

    def load_inputs(self, oracle: Oracle, step: GlobalStep) -> None:
        """Give an oracle what a step's forwards depend on besides the weights."""
        oracle.set_forward_state(with_unique_draws(step.ranks), own_buffers=self.behavior.own_buffers)

    @cached_property
    def start(self) -> Tensors:
        """The job's initial weights, in the precision in which the subject gets them."""
        model = self.workload.model(self.cell_oracle.dtype)
        stepped: torch.dtype = getattr(torch, self.cell.arithmetic.stepped)
        return {name: parameter.detach().to(stepped) for name, parameter in model.named_parameters()}

    @cached_property
    def layouts(self) -> dict[int, Layout]:
        """The layout of each step taken, by step index: which rank and device computed which samples."""
        return {step.index: self.layout(step) for step in self.steps_taken}

    def layout(self, step: GlobalStep) -> Layout:
        """Return the layout of a step, also of a skipped one."""
        spread = self.cell.parallelism.devices_per_process(self.cell.topology)
        return contract_layout(with_unique_draws(step.ranks), spread, self.window)

    def one_device(self, layout: Layout) -> Layout:
        """Return the same samples as one device takes them, each batch at once."""
        return one_device_layout(layout, self.cell.parallelism.micro_batches)

    @cached_property
    def expected(self) -> dict[int, ExpectedGradients]:
        """The correct gradients at each step taken, by step index."""
        return {step.index: self._expected(step) for step in self.steps_taken}

    def _expected(self, step: GlobalStep) -> ExpectedGradients:
        layout = self.layouts[step.index]
        self.load_step(self.oracle, step)
        left = partial(without_held_back, held_back=step.held_back, clip_norm=self.workload.clip_norm)
        parts = [list(map(left, groups)) for groups in self.oracle.group_gradients(layout)]
        raw = mean_gradient(parts)
        contract = self.oracle.clipped(raw)
        gradients = {layout: contract}
        # Both ways at every step, even if they are the same: a trainer follows one of them throughout.
        ways = (self.one_device(layout), single_batch_layout(layout))
        for way in ways:
            if way not in gradients:
                gradients[way] = left(self.oracle.gradient(way))
        units, largest_units = {}, {}
        for name, clipped_value in contract.items():
            absolute = absolute_sum(_shares(parts, name))
            # Clipping scales the roundings of a gradient too.
            shortened = norm(clipped_value) / norm(raw[name]) if norm(raw[name]) else 1.0
            units[name] = norm(absolute) * self.epsilon / 2 * shortened
            if self.cell.arithmetic.autocast is not None:
                largest = float(absolute.double().max()) if absolute.numel() else 0.0
                largest_units[name] = largest * self.compute_epsilon / 2 * shortened
        alone = self._rounding_alone(step, contract, left)
        units |= dict.fromkeys(alone, 0.0)
        return ExpectedGradients(
            tuple(gradients[way] for way in ways), contract, raw, parts, units, largest_units, alone
        )

    def _rounding_alone(
        self, step: GlobalStep, contract: Tensors, left: Callable[[Tensors], Tensors]
    ) -> dict[str, float]:
        names = next_to_nothing(contract)
        if not names:
            return {}
        generator = torch.Generator().manual_seed(self.workload.seed)
        moved, begun = [], self.oracle.model_weights()
        for _ in range(NUDGES):
            self.oracle.compute_at(nudged(begun, generator))
            moved.append(left(self.oracle.gradient(self.layouts[step.index])))
        self.load_step(self.oracle, step)
        return rounding_alone(contract, moved, names)

    @cached_property
    def noise(self) -> NoiseScale:
        """Noise of the gradient: the contract in the cell's precision on one device, in several orders of summation.

        Few samples have few orders, each of which may hardly round at all. So every second run of a step, beginning
        with the first, is repeated at weights less than a rounding away, and compared with float64 at the same weights.
        Float64 is compared with itself: there only the weights of one side are nudged in each run, so the sums in a
        layer differ as in another order.
        """
        noise = NoiseScale()
        generator = torch.Generator().manual_seed(self.workload.seed)
        rng = random.Random(self.workload.seed)
        orders = -(-NOISE_RUNS // max(len(self.steps_taken), 1))
        is_double = self.cell_oracle.dtype is torch.float64
        for step in self.steps_taken:
            expected, layout, before = self.expected[step.index], self.layouts[step.index], step.ranks[0].before
            scale = step.ranks[0].scale or 1.0
            left = partial(without_held_back, held_back=step.held_back, clip_norm=self.workload.clip_norm)
            self.load_step(self.oracle, step)
            self.load_step(self.cell_oracle, step)
            noise.add_rounding(expected.contract, expected.units, expected.largest_units)
            noise.add_rounding_alone(expected.rounding_alone, self.epsilon / torch.finfo(torch.float64).eps)
            for number in range(orders):
                self.cell_oracle.load(nudged(before, generator) if is_double else before)
                measured = left(self.cell_oracle.gradient(shuffled(layout, rng), scale))
                noise.add(measured, expected.contract, expected.units)
                if not is_double and number % 2 == 0:
                    self.cell_oracle.load(within_a_rounding(before, generator, self.compute_epsilon))
                    self.oracle.load(self.cell_oracle.weights())
                    measured = left(self.cell_oracle.gradient(shuffled(layout, rng), scale))
                    noise.add(measured, left(self.oracle.gradient(layout)), expected.units, repeated=True)
        return noise

    @property
    def limit(self) -> float:
        """The limit for a correct trainer's gradient, in × noise."""
        return self.noise.limit

    @cached_property
    def exact(self) -> bool:
        """Whether every divisor is a power of two, so that an exact workload must match bit for bit."""
        return (
            self.workload.exact
            and not self.cell.arithmetic.is_16_bit  # its sums need more bits after some steps
            and all(_is_power_of_two(n) for layout in self.layouts.values() for n in _divisors(layout))
        )

    def allowed(self, limit: float) -> float:
        """Return the limit for a correct trainer in × noise: ``limit``, or 0 if the result must be exact."""
        return 0.0 if self.exact else limit

    @property
    def different_gradients(self) -> Iterable[tuple[GlobalStep, int, Step]]:
        """The ranks' steps whose gradients no earlier rank has, bit for bit."""
        return differing(self.steps_taken, "gradients")


def differing(steps: Iterable[GlobalStep], pick: str) -> Iterator[tuple[GlobalStep, int, Step]]:
    """Yield the ranks' steps whose ``pick`` no earlier rank has, bit for bit."""
    for global_step in steps:
        seen: list[Tensors] = []
        for rank, step in enumerate(global_step.ranks):
            value: Tensors = getattr(step, pick)
            if not any(same(value, other) for other in seen):
                seen.append(value)
                yield global_step, rank, step


def _side_by_side(trace: Trace) -> tuple[GlobalStep, ...]:
    columns = zip(*(rank.steps for rank in trace.ranks), strict=False)
    return tuple(GlobalStep(index, steps) for index, steps in enumerate(columns))


def _shares(parts: Sequence[Sequence[Tensors]], name: str) -> Iterable[Tensor]:
    count = sum(len(groups) for groups in parts)
    return (part[name] / count for groups in parts for part in groups if name in part)


def _epsilon(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps


def _divisors(layout: Layout) -> Iterable[int]:
    yield len(layout)
    for groups in layout:
        yield len(groups)
        for group in groups:
            yield sum(len(share) for share in group)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
