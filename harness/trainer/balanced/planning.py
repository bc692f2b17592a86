"""Plans a balanced training on its first batch: finds the blocks, measures them, and partitions them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from harness.trainer.balanced.batches import first_batch, possible_micro_batches
from harness.trainer.balanced.chain import Chain, find_chain
from harness.trainer.balanced.measured import Balance
from harness.trainer.balanced.pipeline import split
from harness.trainer.balanced.plan import limits_of, plan_chain
from harness.trainer.balanced.stages import Plan
from harness.trainer.checkpoint_file import TrainingState
from harness.trainer.data_sharding import rank_loader
from harness.trainer.loop import step_takes_number
from harness.trainer.module import Module
from harness.trainer.optimizers import parse_optimizers
from harness.trainer.precision_plugins import map_tensors
from harness.trainer.step import StepModule, loss_function


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
    state.optimizers, state.schedules = parse_optimizers(copied.configure_optimizers(), copied)
    loader = rank_loader(trainer, copied.train_dataloader(), training=True)
    threads = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)  # as ranks have it
        return Balance(make_plan(trainer, state, loader, device)[1])
    finally:
        torch.set_num_threads(threads)


def make_plan(trainer: Any, state: TrainingState, loader: Any, device: torch.device) -> tuple[Chain, Plan]:
    """Find the module's blocks on the first batch, measure them, and return them with the fastest plan.

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

    try:
        chain = blocks_on(device, trainer, module, run, split(batch, counts[0])[0])
    except torch.cuda.OutOfMemoryError:  # only the stages will fit, and blocks are measured one by one
        chain = blocks_on(torch.device("cpu"), trainer, module, run, split(batch, counts[0])[0])
    batch = map_tensors(lambda tensor: tensor.to(device), batch)
    limits = memory_limits(plan.device_memory, device, devices)
    return chain, plan_chain(
        module, chain, run, batch, counts, limits, devices=devices, device=device, optimizers=state.optimizers
    )


def blocks_on(device: torch.device, trainer: Any, module: Module, run: Callable[[Any], Any], inputs: Any) -> Chain:
    """Return the blocks, found on a device; the module stays there."""
    module.to(device)
    inputs = map_tensors(lambda tensor: tensor.to(device), inputs)
    training_device, trainer.device = trainer.device, device  # what the user's step asks for
    try:
        return find_chain(module, lambda: run(inputs), trainer.world_size, device, module.configure_blocks())
    finally:
        trainer.device = training_device


def memory_limits(given: int | Sequence[int] | None, device: torch.device, devices: int) -> tuple[int, ...] | None:
    """Return how many bytes each device may hold; None: any."""
    if given is None and device.type == "cuda":
        given = torch.cuda.get_device_properties(device).total_memory
    return limits_of(given, devices)
