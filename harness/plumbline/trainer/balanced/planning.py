"""Plans a balanced training on its first batch: finds the blocks, measures them, and partitions them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plumbline.trainer.balanced.batches import divisors, first_batch, possible_micro_batches
from plumbline.trainer.balanced.blocks import in_mode
from plumbline.trainer.balanced.chain import Chain, find_chain
from plumbline.trainer.balanced.measured import Balance
from plumbline.trainer.balanced.partition import DoesNotFitError
from plumbline.trainer.balanced.pipeline import split
from plumbline.trainer.balanced.plan import best_plan, limits_of, measure_chain
from plumbline.trainer.balanced.stages import Profile, StagePlan
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.loop import step_takes_number
from plumbline.trainer.module import Module
from plumbline.trainer.precision_plugins import map_tensors
from plumbline.trainer.step import StepModule, loss_function
from plumbline.trainer.training_state import TrainingState

Trial = tuple[Callable[[Any], Any], Any]
"""A step, that of training or that of validation, and the batch on which it is tried."""

MOST_DEVICES = 64
"""How many devices are tried to name a number that would do."""


def plan_without_training(trainer: Any, module: Module, device: torch.device) -> Balance:
    """Return how ``module`` would be distributed; itself it is not changed.

    Raises:
        MisconfigurationError: As ``make_plan``.

    """
    copied = deepcopy(module)
    copied.trainer = trainer
    precision = trainer.plan.precision(trainer.plan.dtype, trainer.plan.accelerator)
    precision.convert(copied)
    state = TrainingState(copied, precision)
    loader, val_loader = state.prepare(trainer)
    threads = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)  # as ranks have it
        return Balance(make_plan(trainer, state, loader, val_loader, device)[1])
    finally:
        torch.set_num_threads(threads)


def make_plan(
    trainer: Any, state: TrainingState, loader: Any, val_loader: Any, device: torch.device
) -> tuple[Chain, StagePlan]:
    """Find the module's blocks on the first batches, measure them, and return them with the fastest plan.

    Raises:
        MisconfigurationError: The module has too few blocks, the batches do not divide, or the memory does not suffice.

    """
    plan, module, precision, devices = trainer.plan, state.module, state.precision, trainer.world_size
    counts = possible_micro_batches(loader, plan.micro_batches)
    batch = first_batch(loader, trainer.current_epoch)
    step = StepModule(module, precision)
    loss_of = loss_function(module, precision, False)
    first_turn = (0,) * step_takes_number(state)

    def run(inputs: Any) -> Tensor:
        return loss_of(step("training_step", inputs, 0, *first_turn), inputs)

    stages = possible_stages(plan)

    def evaluate(inputs: Any) -> Any:
        with in_mode(module, training=False):
            return step("validation_step", inputs, 0)

    tried: list[Trial] = [(run, split(batch, counts[0])[0])]
    if val_loader is not None:
        tried.append((evaluate, first_batch(val_loader, trainer.current_epoch)))

    def find(devices: int, least: int) -> Chain:
        try:
            return blocks_on(device, trainer, module, tried, devices, least)
        except torch.cuda.OutOfMemoryError:  # only the stages will fit, and blocks are measured one by one
            return blocks_on(torch.device("cpu"), trainer, module, tried, devices, least)

    chain = find(devices, min(stages))
    batch = map_tensors(lambda tensor: tensor.to(device), batch)
    limits = memory_limits(plan.device_memory, device, devices)
    measure = partial(
        measure_chain, module, step=run, batch=batch, counts=counts, device=device, optimizers=state.optimizers
    )
    profiles = measure(chain)
    try:
        return chain, best_plan(profiles, devices, limits, stages)
    except DoesNotFitError as refusal:
        assert limits is not None  # else everything fits
        enough = devices_that_would_do(lambda count: find(count, count), measure, devices, min(limits))
        if enough is None:
            raise
        raise DoesNotFitError(f"{refusal} {enough} devices of {min(limits):,} bytes each would do.") from None


def devices_that_would_do(
    find: Callable[[int], Chain], measure: Callable[[Chain], dict[int, Profile]], devices: int, memory: int
) -> int | None:
    """Return how many devices, more than ``devices``, would hold the module; None where no number up to 64 does."""
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


def possible_stages(plan: Any) -> list[int]:
    """Return into how many stages the module may be divided: what the user wants, or else any number but one.

    Each node has whole pipelines, or each pipeline has whole nodes.
    """
    if plan.stages is not None:
        return [plan.stages]
    node = plan.processes_per_node
    possible = [stages for stages in divisors(plan.world_size) if stages % node == 0 or node % stages == 0]
    return possible[1:] or possible


def blocks_on(
    device: torch.device,
    trainer: Any,
    module: Module,
    tried: Sequence[Trial],
    devices: int,
    least: int,
) -> Chain:
    """Return the blocks, ``least`` or more, found on a device by the steps ``tried``; the module stays there."""
    module.to(device)
    steps = [partial(run, map_tensors(lambda tensor: tensor.to(device), inputs)) for run, inputs in tried]
    training_device, trainer.device = trainer.device, device  # what the user's step asks for
    try:
        return find_chain(module, steps[0], devices, device, module.configure_blocks(), least, *steps[1:])
    finally:
        trainer.device = training_device


def memory_limits(given: int | Sequence[int] | None, device: torch.device, devices: int) -> tuple[int, ...] | None:
    """Return how many bytes each device may hold; None: any."""
    if given is None and device.type == "cuda":
        given = torch.cuda.get_device_properties(device).total_memory
    return limits_of(given, devices)
