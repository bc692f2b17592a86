"""The training loop: data, forward, backward, clipping, step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from plumbline.devices.types import device_of
from plumbline.trainer.checkpoints import TrainingState
from plumbline.trainer.data_sharding import set_epoch
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.module import Module, in_mode
from plumbline.trainer.nested import batch_length, cast, map_tensors
from plumbline.trainer.optimizers import frozen, parameters_of
from plumbline.trainer.precision_plugins import PrecisionPlugin


class StepEngine(Protocol):
    """Computes a rank's gradients, for the whole module or for one pipeline stage."""

    takes_loss: bool
    """Whether this rank computes the loss."""

    def backward(self, batch: Any, batch_idx: int, arguments: tuple[int, ...], share: int, last: bool) -> torch.Tensor:
        """Add the gradients of the batch's loss / ``share``. Return the loss, or 0 on a rank that does not compute it.

        ``last`` says whether this is the last micro-batch of its step.
        """

    def complete(self, optimizer: Optimizer) -> None:
        """Finish the reduction of the optimizer's gradients over ranks."""

    def clip(self, optimizer: Optimizer, largest: float) -> None:
        """Clip the optimizer's gradients to norm ``largest``, computed over the whole module."""

    def share_buffers(self) -> None:
        """Broadcast the buffers of the first replica of this module or stage to the others."""


class ModuleEngine:
    """The engine of a rank that holds the whole module. ``forward`` can be wrapped in DistributedDataParallel."""

    takes_loss = True

    def __init__(self, forward: nn.Module, module: Module, precision: PrecisionPlugin, splits: bool) -> None:
        self.forward, self.module, self.precision = forward, module, precision
        self.loss_of = loss_function(module, precision, splits)
        # Both are methods of DistributedDataParallel.
        self.no_sync = getattr(forward, "no_sync", nullcontext)
        self.check_reduced = getattr(forward, "_check_reducer_finalized", None)

    def backward(self, batch: Any, batch_idx: int, arguments: tuple[int, ...], share: int, last: bool) -> torch.Tensor:
        with nullcontext() if last else self.no_sync():
            loss = self.loss_of(self.forward("training_step", batch, batch_idx, *arguments), batch)
            self.precision.backward(loss / share if share > 1 else loss)
        return loss.detach()

    def complete(self, optimizer: Optimizer) -> None:
        if self.check_reduced is None:
            return
        try:  # DDP itself checks this only at its next forward
            self.check_reduced()
        except RuntimeError as error:
            raise MisconfigurationError(
                "Some parameters did not contribute to the loss, so their gradients were not averaged over ranks: "
                f"freeze them, or pass find_unused_parameters=True in configure_ddp. ({error})"
            ) from error

    def clip(self, optimizer: Optimizer, largest: float) -> None:
        clip_grad_norm_(parameters_of(optimizer), largest)

    def share_buffers(self) -> None:
        if getattr(self.forward, "broadcast_buffers", False) and dist.get_world_size() > 1:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)


@dataclass
class RankResources:
    """A rank's engine, devices, loaders and weights.

    ``evaluate`` runs validation steps without synchronising ranks, which can have unequal numbers of batches.
    ``weights`` has, for each optimizer, the module's parameters that it trains. ``waiting(description)`` is a context
    for operations in which ranks wait for each other.
    """

    engine: StepEngine
    evaluate: nn.Module
    devices: list[torch.device]
    train_loader: Any
    val_loader: Any
    weights: list[list[nn.Parameter]]
    waiting: Callable[..., AbstractContextManager[None]] = field(default=nullcontext)


@dataclass(frozen=True)
class Turn:
    """One optimizer's part of a step: the weights of the ``others``, and extra arguments of ``training_step``."""

    optimizer: Optimizer
    others: list[nn.Parameter]
    arguments: tuple[int, ...]


def train(trainer: Any, state: TrainingState, resources: RankResources) -> None:
    state.module.zero_grad()
    if not state.module.training:  # otherwise, layers that the user set to evaluation mode keep it
        state.module.train()
    while trainer.plan.max_epochs is None or trainer.current_epoch < trainer.plan.max_epochs:
        if not train_epoch(trainer, state, resources):
            return
        if resources.val_loader is not None and trainer.plan.val_every is None:
            validate(trainer, state.module, resources)
        for schedule in state.schedules:
            if schedule.interval == "epoch":
                schedule.step(trainer.metrics)
        trainer.current_epoch += 1
        state.batches = 0


def train_epoch(trainer: Any, state: TrainingState, resources: RankResources) -> bool:
    """Train the rest of this epoch. Return False if ``max_steps`` ended it early."""
    plan, precision, engine = trainer.plan, state.precision, resources.engine
    turns = take_turns(state, resources)
    move = partial(to_device, devices=resources.devices, whole=end_takes_batch(state.module))
    val_every = plan.val_every if resources.val_loader is not None else None
    losses: list[tuple[torch.Tensor, Any]] = []  # the last step's losses, with their micro-batches

    set_epoch(resources.train_loader, trainer.current_epoch)
    batches = itertools.islice(resources.train_loader, state.batches, None)
    for window in windows(batches, plan.accumulate, uneven(resources.train_loader, plan.data_ranks)):
        # Checked after a batch has been drawn: if max_steps ends with the epoch, the epoch is complete.
        if plan.max_steps is not None and trainer.global_step >= plan.max_steps:
            report_loss(trainer, state.module, losses, resources)
            return False
        share, losses = len(window), []
        for index, unmoved in enumerate(window, start=1):
            batch, last = move(unmoved), index == share
            for turn in turns:
                with frozen(turn.others):
                    loss = engine.backward(batch, state.batches, turn.arguments, share, last)
                if last:
                    engine.complete(turn.optimizer)
                    precision.unscale(turn.optimizer)
                    if plan.clip_norm:
                        engine.clip(turn.optimizer, plan.clip_norm)
                    precision.step(turn.optimizer)
                    turn.optimizer.zero_grad()
            losses.append((loss, batch))
            state.batches += 1
            if last:
                precision.update()
                trainer.global_step += 1
                for schedule in state.schedules:
                    if schedule.interval == "step" and precision.stepped(schedule.scheduler.optimizer):
                        schedule.step(trainer.metrics)
            if val_every and state.batches % val_every == 0:
                validate(trainer, state.module, resources)
        if plan.checkpoint_every and trainer.global_step % plan.checkpoint_every == 0:
            trainer.save_checkpoint(plan.checkpoint_path.format(step=trainer.global_step))
    report_loss(trainer, state.module, losses, resources)
    return True


def windows(batches: Iterator[Any], size: int, agree: bool) -> Iterator[list[Any]]:
    """Yield lists of the micro-batches of one step.

    The whole window is drawn before it is used, because losses are divided by its length, and the last window of an
    epoch can be shorter. With ``agree``, all ranks stop when the first rank runs out of batches, so that none waits
    forever.
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
    backend = dist.get_backend()
    box = torch.tensor(count, device="cpu" if ":" in backend else device_of(backend))
    dist.all_reduce(box, dist.ReduceOp.MIN)
    return int(box)


def uneven(loader: Any, world: int) -> bool:
    """Return whether ranks can have unequal numbers of batches, as with a dataset that shards itself."""
    return world > 1 and isinstance(getattr(loader, "dataset", None), IterableDataset)


def take_turns(state: TrainingState, resources: RankResources) -> list[Turn]:
    """Return the turns of the optimizers. During a turn, only that optimizer's weights require gradients."""
    takes_number = step_takes_number(state)
    turns = []
    for number, (optimizer, own) in enumerate(zip(state.optimizers, resources.weights, strict=True)):
        mine = {id(weight) for weight in own}
        others = [weight for weights in resources.weights for weight in weights if id(weight) not in mine]
        turns.append(Turn(optimizer, others, (number,) * takes_number))
    return turns


def step_takes_number(state: TrainingState) -> bool:
    names = inspect.signature(state.module.training_step).parameters
    return len(state.optimizers) > 1 and ("optimizer_idx" in names or len(names) > 2)


def to_device(batch: Any, devices: list[torch.device], whole: bool = False) -> Any:
    """Return the batch on the first device.

    With several devices, DataParallel splits the batch itself. It is moved only if ``training_step_end`` needs it
    ``whole`` as well.
    """
    if devices[0].type == "cpu" or (len(devices) > 1 and not whole):
        return batch
    return map_tensors(lambda tensor: tensor.to(devices[0], non_blocking=True), batch)


def validate(trainer: Any, module: Module, resources: RankResources) -> None:
    """Set the metrics to their means over all validation samples. Gradients and training modes do not change."""
    resources.engine.share_buffers()
    totals: dict[str, torch.Tensor] = {}
    with torch.no_grad(), in_mode(resources.evaluate, training=False):
        for index, batch in enumerate(resources.val_loader):
            rows = resources.evaluate("validation_step", to_device(batch, resources.devices), index)
            for name, row in rows.items():
                totals[name] = row.sum(0) + totals.get(name, 0)
    sums = {name: tuple(total.tolist()) for name, total in totals.items()}
    with resources.waiting("metrics"):
        means = means_over_ranks(sums, trainer.world_size)
    trainer.metrics.update(means)
    module.on_metrics(means)


def report_loss(trainer: Any, module: Module, losses: list[tuple[torch.Tensor, Any]], resources: RankResources) -> None:
    """Set the metric ``loss`` to the mean loss over all samples of the last step, on all ranks."""
    if losses:
        counts = [batch_length(batch) or 1 for _, batch in losses]
        total = torch.stack([loss.double() * count for (loss, _), count in zip(losses, counts, strict=True)]).sum()
        sums = torch.stack([total, total.new_tensor(sum(counts))])
        if not resources.engine.takes_loss:
            sums.zero_()
        if trainer.world_size > 1:
            with resources.waiting("the last loss"):
                dist.all_reduce(sums)
        metrics = {"loss": float(sums[0] / sums[1])}
        trainer.metrics.update(metrics)
        module.on_metrics(metrics)


def means_over_ranks(totals: dict[str, tuple[float, float]], world: int) -> dict[str, float]:
    """Return Σ sums / Σ weights over all ranks for each name. Ranks without samples can lack names."""
    every = [totals]
    if world > 1:
        every = [totals] * world
        dist.all_gather_object(every, totals)
    names = dict.fromkeys(name for one in every for name in one)
    return {
        name: sum(one[name][0] for one in every if name in one) / sum(one[name][1] for one in every if name in one)
        for name in names
    }


class StepModule(nn.Module):
    """Runs a step of the user's module in the trainer's precision.

    DataParallel runs this forward in threads, which do not inherit autocast. Autocast is therefore entered here.
    """

    def __init__(self, module: Module, precision: PrecisionPlugin) -> None:
        super().__init__()
        self.module = module
        self.precision = precision
        self.ends = ends_itself(module)

    def forward(self, hook: str, batch: Any, *indices: int) -> Any:
        """Return the result of the method ``hook``: a loss, outputs for ``training_step_end``, or weighted metrics."""
        if self.precision.casts_batches:
            batch = cast(batch, self.precision.dtype)
        with self.precision.autocast():
            outputs = getattr(self.module, hook)(batch, *indices)
        if hook == "validation_step":
            return weighted(outputs, batch_length(batch) or 1, self.precision.device_type)
        return outputs if self.ends else scalar_loss(outputs)


def ends_itself(module: Module) -> bool:
    return type(module).training_step_end is not Module.training_step_end


def scalar_loss(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
    raise MisconfigurationError(
        f"The loss is {found}, not a scalar tensor: return loss.mean(), or a dict with it as 'loss', from "
        "training_step (or from training_step_end, if there is one)."
    )


def loss_function(module: Module, precision: PrecisionPlugin, splits: bool) -> Callable[[Any, Any], Tensor]:
    """Return a function that computes the loss from a training step's gathered outputs and the whole batch."""
    if not ends_itself(module):
        return lambda outputs, batch: outputs.mean() if splits else outputs
    takes_batch = end_takes_batch(module)

    def loss(outputs: Any, batch: Any) -> Tensor:
        if takes_batch and precision.casts_batches:
            batch = cast(batch, precision.dtype)
        with precision.autocast():
            return scalar_loss(module.training_step_end(outputs, *(batch,) * takes_batch))

    return loss


def end_takes_batch(module: Module) -> bool:
    """Return whether the user's ``training_step_end`` has a second argument, for the whole batch."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.training_step_end).parameters.values()
    return sum(parameter.kind in positional for parameter in parameters) > 1


def weighted(metrics: Any, samples: int, device_type: str) -> dict[str, Tensor]:
    """Return each metric as ``[[value × samples, samples]]``, a row that is summed over replicas and batches."""
    named = metrics if isinstance(metrics, dict) else {"val_loss": metrics}
    rows = {}
    for name, value in named.items():
        value = torch.as_tensor(value, device=device_type).detach().double().mean() * samples
        rows[name] = torch.stack([value, value.new_tensor(samples)])[None]
    return rows
