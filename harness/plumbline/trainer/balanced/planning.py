"""Plans a balanced training with its first batch: finds blocks, measures them, and chooses the fastest plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.devices.calls import OutOfMemoryError, total_bytes
from plumbline.trainer.balanced.blocks import undisturbed
from plumbline.trainer.balanced.chain import Chain, find_chain
from plumbline.trainer.balanced.partition import DoesNotFitError, StageCosts, partition
from plumbline.trainer.balanced.pipeline import split
from plumbline.trainer.balanced.pipeline_batches import divisors, first_batch, possible_micro_batches
from plumbline.trainer.balanced.profile import optimizer_state_bytes, profile
from plumbline.trainer.balanced.stage_plan import Balance, Prediction, Profile, Stage, StagePlan
from plumbline.trainer.checkpoints import TrainingState
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.loop import StepModule, loss_function, step_takes_number
from plumbline.trainer.module import Module, in_mode
from plumbline.trainer.nested import map_tensors


def best_plan(
    profiles: dict[int, Profile],
    devices: int,
    memory: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
) -> StagePlan:
    """Return the plan with the shortest simulated step, including the optimizers' step.

    The keys of ``profiles`` are numbers of micro-batches. ``memory`` has the bytes of each device; device ``d`` has
    stage ``d`` modulo the number of stages. ``stages`` are the numbers of stages to choose from, divisors of
    ``devices``; by default only ``devices``. The other devices have replicas of the stages, which share the
    micro-batches. If no plan fits, the error is that of the plan with the most stages and micro-batches.
    """
    found: list[tuple[StagePlan, Profile]] = []
    refusals: dict[tuple[bool, int, int], MisconfigurationError] = {}
    for number in stages or [devices]:
        replicas = devices // number
        limits = None if memory is None else [min(memory[stage::number]) for stage in range(number)]
        for count, measured in profiles.items():
            try:
                if count % replicas:
                    raise MisconfigurationError(
                        f"{count} micro-batches cannot be shared by {replicas} replicas of {number} stages: use a "
                        "multiple, other batches, or another number of stages."
                    )
                chosen = partition(measured, number, count // replicas, limits)
                found.append((plan_stages(measured, chosen, count, limits, replicas), measured))
            except MisconfigurationError as refusal:
                refusals[isinstance(refusal, DoesNotFitError), number, count] = refusal
    if not found:
        raise refusals[max(refusals)]
    most = WORTH_IMPROVING * min(planned.predicted.period_seconds for planned, _ in found)
    return min((improved(*one) for one in found if one[0].predicted.period_seconds <= most), key=cost)


LEAST_GAIN = 1e-9
"""Minimum relative gain for which a plan replaces another. Smaller gains are rounding errors."""

WORTH_IMPROVING = 2.0
"""Plans are improved block by block if their step takes at most this many times the shortest step."""


def cost(planned: StagePlan) -> tuple[float, int]:
    """Return the cost by which plans are compared: the seconds from one step to the next, then the peak memory."""
    return planned.predicted.period_seconds, max(planned.predicted.stage_peak_bytes)


def improved(best: StagePlan, measured: Profile) -> StagePlan:
    """Move single blocks between stages as long as that makes the plan faster, and return the resulting plan.

    A partition minimises the time of the slowest stage, which dominates if there are many micro-batches. If there are
    few, the start and the end of a step also matter, and the optimizers' steps there.
    """
    while True:
        others = (
            plan_stages(measured, moved, best.micro_batches, best.memory, best.replicas)
            for moved in moved_by_one(best.stages)
        )
        better = min(filter(_fits, others), key=cost, default=best)
        if better.predicted.period_seconds >= best.predicted.period_seconds * (1 - LEAST_GAIN):
            return best
        best = better


def moved_by_one(stages: Sequence[Stage]) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages with one boundary moved by one block. Each stage keeps at least one block."""
    bounds = [0, *(stage.last for stage in stages)]
    for index in range(1, len(stages)):
        for bound in (bounds[index] - 1, bounds[index] + 1):
            if bounds[index - 1] < bound < bounds[index + 1]:
                moved = [*bounds[:index], bound, *bounds[index + 1 :]]
                yield tuple(Stage(first, last) for first, last in pairwise(moved))


def _fits(planned: StagePlan) -> bool:
    limits = planned.memory
    return limits is None or all(
        peak <= limit for peak, limit in zip(planned.predicted.stage_peak_bytes, limits, strict=True)
    )


def plan_stages(
    measured: Profile,
    stages: Sequence[Stage],
    micro_batches: int,
    memory: Sequence[int] | None = None,
    replicas: int = 1,
) -> StagePlan:
    costs = StageCosts(measured, len(stages), micro_batches // replicas)
    unknown = Prediction(
        step_seconds=0.0,
        optimizer_seconds=tuple(costs.optimizer_seconds(stage.first, stage.last) for stage in stages),
        stage_seconds=tuple(costs.seconds(stage.first, stage.last) for stage in stages),
        stage_peak_bytes=tuple(costs.peak_bytes(one.first, one.last, number) for number, one in enumerate(stages)),
        bubble_share=0.0,
    )
    planned = StagePlan(
        measured.blocks,
        tuple(stages),
        micro_batches,
        unknown,
        None if memory is None else tuple(memory),
        measured.ties,
        replicas,
    )
    schedule = planned.schedule()
    predicted = replace(
        unknown,
        step_seconds=schedule.makespan,
        bubble_share=schedule.bubble_share,
        period_seconds=schedule.period(unknown.optimizer_seconds),
    )
    return replace(planned, predicted=predicted)


Trial = tuple[Callable[[Any], Any], Any]
"""The training or validation step, and the batch with which it is tried."""

MOST_DEVICES = 64
"""Maximum number of devices that is tried to find a number that would suffice."""


def plan_without_training(trainer: Any, module: Module, device: torch.device) -> Balance:
    """Return the plan by which ``module`` would be distributed. ``module`` is not changed."""
    copied = deepcopy(module)
    copied.trainer = trainer
    precision = trainer.plan.precision(trainer.plan.dtype, trainer.plan.accelerator)
    precision.convert(copied)
    state = TrainingState(copied, precision)
    loader, val_loader = state.prepare(trainer)
    threads = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)  # as on ranks
        return Balance(make_plan(trainer, state, loader, val_loader, device)[1])
    finally:
        torch.set_num_threads(threads)


def make_plan(
    trainer: Any, state: TrainingState, loader: Any, val_loader: Any, device: torch.device
) -> tuple[Chain, StagePlan]:
    """Find the module's blocks with the first batches, measure them, and return them with the fastest plan."""
    plan, module, devices = trainer.plan, state.module, trainer.world_size
    counts = possible_micro_batches(loader, plan.micro_batches)
    batch = first_batch(loader, trainer.current_epoch)
    step = StepModule(module, state.precision)
    loss_of = loss_function(module, state.precision, False)
    first_turn = (0,) * step_takes_number(state)
    if plan.stages is not None:
        stages = [plan.stages]
    else:  # each node has complete pipelines, or each pipeline has complete nodes
        node = plan.processes_per_node
        whole = [number for number in divisors(devices) if number % node == 0 or node % number == 0]
        stages = whole[1:] or whole

    def run(inputs: Any) -> Tensor:
        return loss_of(step("training_step", inputs, 0, *first_turn), inputs)

    def evaluate(inputs: Any) -> Any:
        with in_mode(module, training=False):
            return step("validation_step", inputs, 0)

    tried: list[Trial] = [(run, split(batch, counts[0])[0])]
    if val_loader is not None:
        tried.append((evaluate, first_batch(val_loader, trainer.current_epoch)))

    def find(devices: int, least: int) -> Chain:
        try:
            return blocks_on(device, trainer, module, tried, devices, least)
        except OutOfMemoryError:  # perhaps only stages fit on the device, where blocks are measured one by one
            return blocks_on(torch.device("cpu"), trainer, module, tried, devices, least)

    def measure(chain: Chain) -> dict[int, Profile]:
        return measure_chain(module, chain, run, batch, counts, device=device, optimizers=state.optimizers)

    chain = find(devices, min(stages))
    batch = map_tensors(lambda tensor: tensor.to(device), batch)
    limits = memory_limits(plan.device_memory, device, devices)
    profiles = measure(chain)
    try:
        return chain, best_plan(profiles, devices, limits, stages)
    except DoesNotFitError as refusal:
        assert limits is not None  # otherwise everything fits
        enough = devices_that_would_do(lambda count: find(count, count), measure, devices, min(limits))
        if enough is None:
            raise
        raise DoesNotFitError(f"{refusal} {enough} devices of {min(limits):,} bytes each would suffice.") from None


def measure_chain(
    module: nn.Module,
    chain: Chain,
    step: Callable[[Any], Any],
    batch: Any,
    counts: Iterable[int],
    *,
    device: torch.device,
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[int, Profile]:
    """Return a profile of a chain's blocks for each number of micro-batches in ``counts``.

    Each number is profiled with micro-batches of the resulting size, because small ones take longer per sample. Numbers
    whose micro-batches make the step fail are left out, such as micro-batches of one sample with BatchNorm.
    """
    state = optimizer_state_bytes(module, optimizers)
    profiles: dict[int, Profile] = {}
    refusal: Exception | None = None
    interception = chain.interception(module, device)
    with interception.installed(), undisturbed(module, device):
        blocks = chain.runnable(interception, step)
        for count in sorted(counts, reverse=True):
            try:
                profiles[count] = profile(module, blocks, split(batch, count)[0], device, state, optimizers)
            except (RuntimeError, ValueError) as error:
                refusal = error
    if not profiles:
        assert refusal is not None
        raise refusal
    return profiles


def devices_that_would_do(
    find: Callable[[int], Chain], measure: Callable[[Chain], dict[int, Profile]], devices: int, memory: int
) -> int | None:
    """Return the least number of devices with enough memory for the module, None if no number up to 64 suffices."""
    profiles: dict[Chain, dict[int, Profile]] = {}
    for count in range(devices + 1, MOST_DEVICES + 1):
        try:
            chain = find(count)
            if chain not in profiles:
                profiles[chain] = measure(chain)
            best_plan(profiles[chain], count, [memory] * count)
        except DoesNotFitError:
            continue
        except MisconfigurationError:  # there are no more blocks
            return None
        return count
    return None


def blocks_on(
    device: torch.device,
    trainer: Any,
    module: Module,
    tried: Sequence[Trial],
    devices: int,
    least: int,
) -> Chain:
    """Move the module to a device, run the steps ``tried`` there, and return the blocks, at least ``least``."""
    module.to(device)
    steps = [partial(run, map_tensors(lambda tensor: tensor.to(device), inputs)) for run, inputs in tried]
    training_device, trainer.device = trainer.device, device  # the user's step reads it
    try:
        return find_chain(module, steps[0], devices, device, module.configure_blocks(), least, *steps[1:])
    finally:
        trainer.device = training_device


def memory_limits(given: int | Sequence[int] | None, device: torch.device, devices: int) -> tuple[int, ...] | None:
    if given is None:
        given = total_bytes(device)
    if given is None:
        return None
    limits = (given,) * devices if isinstance(given, int) else tuple(given)
    if len(limits) != devices:
        raise MisconfigurationError(
            f"device_memory has {len(limits)} entries, but there are {devices} devices: give an entry for each device, "
            "or one number for all."
        )
    return limits
