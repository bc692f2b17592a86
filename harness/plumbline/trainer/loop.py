"""The training loop, from top to bottom: data, forward, backward, clip, step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from plumbline.trainer.checkpoint_file import TrainingState, capture, write
from plumbline.trainer.data_sharding import batch_length, set_epoch
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.module import Module
from plumbline.trainer.optimizers import OnlyItsOwn, parameters_of, zeroing
from plumbline.trainer.precision_plugins import map_tensors
from plumbline.trainer.step import end_takes_batch, loss_function

NOTHING = nullcontext()


@dataclass
class Work:
    """What a rank trains with.

    ``forward`` synchronises; ``evaluate`` does not, as ranks may have unequal numbers of validation batches.
    ``devices`` are this rank's; ``weights`` holds for each optimizer the module's parameters that it trains. With a
    ``pipeline`` this rank computes one stage of each batch. ``waiting`` is entered where ranks wait for one another to
    report something, with what that is.
    """

    forward: nn.Module
    evaluate: nn.Module
    devices: list[torch.device]
    train_loader: Any
    val_loader: Any
    weights: list[list[nn.Parameter]]
    pipeline: StagedBackward | None = None
    waiting: Callable[..., AbstractContextManager[None]] = field(default=nullcontext)


class StagedBackward(Protocol):
    """What a rank does that holds only one stage of the module."""

    takes_loss: bool
    """Whether the loss is computed here: one rank's counts."""

    def backward(self, batch: Any, batch_idx: int, arguments: tuple[int, ...], share: int) -> torch.Tensor:
        """Add the gradients of the batch's loss / ``share``; return the loss where it is known, else 0."""

    def complete(self, optimizer: Optimizer) -> None:
        """Make the optimizer's gradients those of all stages."""

    def clip(self, optimizer: Optimizer, largest: float) -> None:
        """Limit the norm of the optimizer's gradients over all stages."""


@dataclass(frozen=True)
class Turn:
    """One optimizer's part of a step; ``parameters`` are what it steps: weights, or their masters."""

    optimizer: Optimizer
    parameters: Sequence[torch.Tensor]
    zero_grad: Callable[[], None]
    context: Any
    arguments: tuple[int, ...]


def train(trainer: Any, state: TrainingState, work: Work) -> None:
    """Train until ``max_epochs`` or ``max_steps``."""
    state.module.zero_grad()
    if not state.module.training:
        state.module.train()
    while trainer.plan.max_epochs is None or trainer.current_epoch < trainer.plan.max_epochs:
        if not train_epoch(trainer, state, work):
            return
        if work.val_loader is not None and trainer.plan.val_every is None:
            validate(trainer, state.module, work)
        for schedule in state.schedules:
            if schedule.interval == "epoch":
                schedule.step(trainer.metrics)
        trainer.current_epoch += 1
        state.batches = 0


def train_epoch(trainer: Any, state: TrainingState, work: Work) -> bool:
    """Train the rest of this epoch; return False if ``max_steps`` cut it short."""
    plan, precision, forward, pipeline = trainer.plan, state.precision, work.forward, work.pipeline
    clip_norm, checkpoint_every = plan.clip_norm, plan.checkpoint_every
    loss_of = loss_function(state.module, precision, len(work.devices) > 1)
    # Nobody hooks a step that DDP has not wrapped: spare it the way through __call__.
    call = forward if plan.backend.synchronises else forward.forward
    turns = take_turns(state, work)
    move = batch_mover(work.devices, whole=end_takes_batch(state.module))
    no_sync = getattr(forward, "no_sync", nullcontext)
    check_reduced = getattr(forward, "_check_reducer_finalized", None)
    max_steps = float("inf") if plan.max_steps is None else plan.max_steps
    val_every = plan.val_every if work.val_loader is not None else None
    step_schedules = [schedule for schedule in state.schedules if schedule.interval == "step"]
    losses: list[tuple[torch.Tensor, Any]] = []  # of the last step, by micro-batch, with the batch

    set_epoch(work.train_loader, trainer.current_epoch)
    batches = itertools.islice(work.train_loader, state.batches, None)
    for window in windows(batches, plan.accumulate, uneven(work.train_loader, plan.data_ranks)):
        if trainer.global_step >= max_steps:  # asked here, with a batch at hand, so that a whole epoch ends as one
            report_loss(trainer, state.module, losses, work)
            return False
        share, losses = len(window), []
        for place, batch in enumerate(window, start=1):
            last = place == share
            if move is not None:
                batch = move(batch)
            for turn in turns:
                with NOTHING if last else no_sync(), turn.context:
                    if pipeline is None:
                        loss = loss_of(call("training_step", batch, state.batches, *turn.arguments), batch)
                        precision.backward(loss if share == 1 else loss / share)
                    else:
                        loss = pipeline.backward(batch, state.batches, turn.arguments, share)
                if last:
                    if check_reduced is not None:
                        insist(check_reduced)
                    if pipeline is not None:
                        pipeline.complete(turn.optimizer)
                    precision.unscale(turn.optimizer)
                    if clip_norm and pipeline is not None:
                        pipeline.clip(turn.optimizer, clip_norm)
                    elif clip_norm:
                        clip_grad_norm_(turn.parameters, clip_norm)
                    precision.step(turn.optimizer)
                    turn.zero_grad()
            losses.append((loss.detach(), batch))
            state.batches += 1
            if last:
                precision.update()
                trainer.global_step += 1
                for schedule in step_schedules:
                    if precision.stepped(schedule.scheduler.optimizer):
                        schedule.step(trainer.metrics)
            if val_every and state.batches % val_every == 0:
                validate(trainer, state.module, work)
        if checkpoint_every and trainer.global_step % checkpoint_every == 0 and (trainer.rank == 0 or pipeline):
            checkpoint = capture(trainer, state)
            if trainer.rank == 0:
                write(checkpoint, plan.checkpoint_path.format(step=trainer.global_step))
    report_loss(trainer, state.module, losses, work)
    return True


def windows(batches: Iterator[Any], size: int, agree: bool) -> Iterator[list[Any]]:
    """Yield the micro-batches of one step at a time.

    A window is drawn before it is used, because its losses are divided by its true length: the last one of an
    epoch may be shorter. With ``agree`` all ranks stop at the one that has least, so that none waits for the
    others for ever.
    """
    while window := list(itertools.islice(batches, size)):
        if agree:
            window = window[: least(len(window))]
        if not window:
            return
        yield window
    if agree:
        least(0)


def least(count: int) -> int:
    """Return the smallest ``count`` of all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    box = torch.tensor(count, device=device)
    dist.all_reduce(box, dist.ReduceOp.MIN)
    return int(box)


def uneven(loader: Any, world: int) -> bool:
    """Return whether ranks may have unequal numbers of batches, as those of a dataset that shards itself do."""
    return world > 1 and isinstance(getattr(loader, "dataset", None), IterableDataset)


def take_turns(state: TrainingState, work: Work) -> list[Turn]:
    """Return each optimizer's turn; several leave each other's weights alone."""
    several, takes_number = len(state.optimizers) > 1, step_takes_number(state)
    turns = []
    for number, (optimizer, own) in enumerate(zip(state.optimizers, work.weights, strict=True)):
        mine = {id(weight) for weight in own}
        others = [weight for weights in work.weights for weight in weights if id(weight) not in mine]
        parameters = parameters_of(optimizer)
        context = OnlyItsOwn(others) if several else NOTHING
        turns.append(Turn(optimizer, parameters, zeroing(optimizer), context, (number,) * takes_number))
    return turns


def step_takes_number(state: TrainingState) -> bool:
    """Return whether ``training_step`` is told whose turn it is."""
    names = inspect.signature(state.module.training_step).parameters
    return len(state.optimizers) > 1 and ("optimizer_idx" in names or len(names) > 2)


def batch_mover(devices: list[torch.device], whole: bool = False) -> Callable[[Any], Any] | None:
    """Return what brings a batch to the (first) device; None where it is there.

    Over several devices DataParallel spreads it itself, unless it is needed ``whole`` as well.
    """
    if devices[0].type == "cpu" or (len(devices) > 1 and not whole):
        return None
    return partial(map_tensors, lambda tensor: tensor.to(devices[0], non_blocking=True))


def insist(check_reduced: Callable[[], None]) -> None:
    """Raise if this backward left gradients that were not averaged; DDP says so only at its next forward."""
    try:
        check_reduced()
    except RuntimeError as error:
        raise MisconfigurationError(
            "Some weights took no part in the loss, so their gradients were not averaged over ranks: freeze "
            f"them, or pass find_unused_parameters=True in configure_ddp. ({error})"
        ) from error


def validate(trainer: Any, module: Module, work: Work) -> None:
    """Set the metrics to the means over all validation samples; gradients and training modes stay."""
    modes = [(layer, layer.training) for layer in work.evaluate.modules()]
    if getattr(work.forward, "broadcast_buffers", False) and trainer.world_size > 1:
        share_buffers(work.evaluate)
    move = batch_mover(work.devices)
    totals: dict[str, torch.Tensor] = {}
    work.evaluate.eval()
    with torch.no_grad():
        for index, batch in enumerate(work.val_loader):
            rows = work.evaluate("validation_step", batch if move is None else move(batch), index)
            for name, row in rows.items():
                totals[name] = row.sum(0) + totals.get(name, 0)
    for layer, mode in modes:
        layer.training = mode
    sums = {name: tuple(total.tolist()) for name, total in totals.items()}
    with work.waiting("metrics"):
        means = means_over_ranks(sums, trainer.world_size)
    report(trainer, module, means)


def share_buffers(module: nn.Module) -> None:
    """Give all ranks rank 0's buffers, as DDP does before a training forward."""
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


def report_loss(trainer: Any, module: Module, losses: list[tuple[torch.Tensor, Any]], work: Work) -> None:
    """Set the metric ``loss`` to the last step's: the mean over the samples of all its micro-batches and ranks."""
    if losses:
        counts = [batch_length(batch) or 1 for _, batch in losses]
        total = torch.stack([loss.double() * count for (loss, _), count in zip(losses, counts, strict=True)]).sum()
        sums = torch.stack([total, total.new_tensor(sum(counts))])
        if work.pipeline is not None and not work.pipeline.takes_loss:
            sums.zero_()
        if trainer.world_size > 1:
            with work.waiting("the last loss"):
                dist.all_reduce(sums)
        report(trainer, module, {"loss": float(sums[0] / sums[1])})


def report(trainer: Any, module: Module, metrics: dict[str, float]) -> None:
    """Take over new metrics, and tell the user's module of them."""
    trainer.metrics.update(metrics)
    module.on_metrics(metrics)


def means_over_ranks(totals: dict[str, tuple[float, float]], world: int) -> dict[str, float]:
    """Return Σ sums / Σ weights for each name, over all ranks; a rank without samples may lack names."""
    every = [totals]
    if world > 1:
        every = [totals] * world
        dist.all_gather_object(every, totals)
    names = dict.fromkeys(name for one in every for name in one)
    return {
        name: sum(one[name][0] for one in every if name in one) / sum(one[name][1] for one in every if name in one)
        for name in names
    }
