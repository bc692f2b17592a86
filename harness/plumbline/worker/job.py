"""The job of a subject: everything it needs to train one cell. This is the public interface for subjects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plumbline.core.mesh import FlatPart, Part
from plumbline.own_workloads.load import workload_of
from plumbline.worker.assignment import Assignment
from plumbline.worker.recorder.recorder import StepHooks
from plumbline.workloads import Columns, Workload

IGNORED = -100
"""The label that ``torch.nn.CrossEntropyLoss`` and transformers leave out of a loss."""


class Job:
    """One rank's view of a cell.

    Attributes:
        dataset, val_dataset: map-style datasets of dicts of tensors, each sample with its ``"index"``.
        epochs, max_steps, accumulate, clip_norm, shuffle, seed: hyper-parameters, None if unused.
        steps: optimizer steps of the whole training, for a trainer without epochs (``data="iterations"``); each has
            ``accumulate`` batches.
        validate_every: evaluate on ``val_dataset`` after this many batches, counted from the start of an epoch or, with
            ``data="iterations"``, of the training. Use ``model.eval()`` and ``no_grad``; the evaluation must not change
            the training. None without evaluation.
        unused_parameters: whether a step may leave parameters unused, everywhere or on some ranks.
        checkpoint_dir: a folder that all ranks see, None if there is nothing to save.
        stop_after_step: save to ``checkpoint_dir`` after this many optimizer steps, and return. None: do not stop.
        resume: resume from the checkpoint in ``checkpoint_dir``, as if the training had never stopped. The number of
            ranks may have changed.
        batch_size: samples per batch of a loader of this process.
        micro_batches: the number of equal parts of a batch in a pipeline; 1 elsewhere.
        global_batch_size: samples per batch over all processes.
        mesh: the sizes of the backend's mesh by the names of its dimensions, outermost first, as in
            ``init_device_mesh``; empty on one device.
        data_rank, data_ranks: this process's share of each batch, and the number of shares. Processes with parts of one
            replica have the same share.
        backend, precision, gpus, num_nodes: the cell; ``gpus`` is per node.
        rank, local_rank, node_rank, world_size: the place of this process: one per device for ddp, one per node for dp
            and ddp2. A subject with ``launch="node"`` starts ``gpus`` processes per node itself. In all of them these
            are the values of the node's first rank, except in a script that has its own RANK.
        device, devices: this process's device, and all of its devices (dp, ddp2; all devices of the node with
            ``launch="node"``).
        device_ids: the argument of ``DistributedDataParallel``: ``[device]``, None on the CPU.
        accelerator: the type of the devices, such as ``"cuda"``; ``"cpu"`` simulates them.
        comm: the backend for ``init_process_group``: ``"gloo"``, ``"nccl"``, or that of another type of device.
    """

    def __init__(self, assignment: Assignment, recorder: StepHooks) -> None:
        cell = assignment.cell
        workload: Workload = workload_of(cell).on(cell.accelerator)
        self._workload = workload
        self._recorder = recorder
        self._arithmetic = cell.arithmetic
        self._dtype: torch.dtype = getattr(torch, cell.arithmetic.storage)

        self.backend, self.precision = cell.backend, cell.precision
        self.gpus, self.num_nodes = cell.topology.gpus, cell.topology.num_nodes
        self.accelerator = cell.accelerator
        self.comm = assignment.comm
        self.rank, self.local_rank, self.node_rank = assignment.rank, assignment.local_rank, assignment.node_rank
        self.world_size = cell.processes

        self.devices = [torch.device(name) for name in assignment.devices]
        self.device = self.devices[0]
        self.device_ids = None if self.device.type == "cpu" else [self.device]

        devices = cell.topology.devices
        self.dataset: Columns = workload.dataset(devices, self._dtype)
        self.val_dataset: Columns = workload.val_dataset(devices, self._dtype)
        self.global_batch_size = workload.global_batch_size(devices)
        self.mesh = dict(cell.parallelism.mesh(cell.topology).dimensions)
        share = cell.parallelism.part(self.rank, cell.topology)
        self.data_rank, self.data_ranks = share.index, share.count
        self.batch_size = self.global_batch_size // self.data_ranks
        self.micro_batches = cell.parallelism.micro_batches
        self.epochs, self.max_steps = workload.epochs, workload.max_steps
        self.steps = workload.steps(devices)
        self.accumulate, self.clip_norm = workload.accumulate, workload.clip_norm
        self.shuffle, self.seed = workload.shuffle, workload.seed
        self.validate_every = workload.validate_every
        self.unused_parameters = workload.unused_parameters
        self.checkpoint_dir, self.resume = assignment.checkpoint_dir, assignment.resume
        self.stop_after_step = assignment.stop_after_step

    def model(self) -> nn.Module:
        """Return a new model on the CPU with the job's seeded weights; ``forward(batch: dict) -> Tensor``."""
        model = self._workload.model(self._dtype)
        self._recorder.watch(model)
        return model

    def model_with_loss(self) -> ModelWithLoss:
        """Return ``model()`` with the loss inside its forward, for scripts that call ``model(**batch).loss``."""
        return ModelWithLoss(self.model(), self.loss)

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the scalar loss of a batch."""
        self._recorder.on_loss(batch)
        return self._workload.loss(outputs, batch)

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the workload's optimizer over ``params``.

        Raises:
            RuntimeError: The workload has several optimizers; call ``optimizers``.
        """
        optimizers = self._workload.optimizers(params)
        if len(optimizers) > 1:
            count = len(optimizers)
            raise RuntimeError(f"{self._workload.name} has {count} optimizers: call job.optimizers(params)")
        return optimizers[0]

    def optimizers(self, params: Iterable[Any]) -> list[torch.optim.Optimizer]:
        """Return the workload's optimizers. Each has its own part of ``params``, in the model's order.

        Each steps once per batch: all after one backward, or in turns, each after its own forward and backward at the
        weights that the previous one left.
        """
        return self._workload.optimizers(params)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return the workload's learning-rate scheduler for ``optimizer``, or None if it has none.

        Call ``scheduler.step()`` after each optimizer step, except after steps that the GradScaler skipped.
        """
        return self._workload.scheduler(optimizer)

    def trial(self) -> AbstractContextManager[None]:
        """Return a context whose forwards and optimizer steps are not part of the training.

        For example, a trainer can measure its layers, or create the optimizer's state by a step with zero gradients.
        """
        return self._recorder.paused()

    def holding(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Return a context in which this rank holds only the parameters and buffers ``names`` of ``model()``.

        The values of the others do not matter: ranks with the same samples hold the model together. After the context,
        the model is complete again.
        """
        return self._recorder.holding(names)

    def parts(self, parts: Mapping[str, FlatPart | Part], ranks: Collection[int] | None = None) -> None:
        """Declare which parts of parameters this rank holds, if plain tensors hold them.

        Parts that are DTensors need not be declared.

        Args:
            parts: this rank's part of each parameter, which may be empty, by the parameter's name in ``model()``.
                Weights and gradients of other parameters are read from the parameters themselves.
            ranks: the ranks whose parts make up these parameters; by default all ranks.

        Raises:
            TraceError: A parameter is unknown, or a part exceeds it or the tensor in which it lies.
        """
        self._recorder.parts(parts, range(self.world_size) if ranks is None else ranks)

    def skipped(self, optimizer: torch.optim.Optimizer, scale: float) -> None:
        """Report that the trainer's own loss scaler skips the next step because of an overflow.

        Call it on every rank, before the next batch. Steps that a GradScaler skips are recorded without it.

        Args:
            optimizer: the optimizer that would have stepped.
            scale: the factor of the loss.
        """
        self._recorder.skipped(optimizer, scale)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's autocast context for forward and loss; it does nothing for 32 and 64."""
        name = self._arithmetic.autocast
        return torch.autocast(self.device.type, getattr(torch, name)) if name else nullcontext()

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return the precision's GradScaler; it is disabled except for 16."""
        return torch.amp.GradScaler(self.device.type, enabled=self._arithmetic.scaled)

    def log(self, name: str, value: float | Tensor) -> None:
        """Report a metric of all ranks, on every rank or on a single one.

        Two names are judged if the loss is a mean over samples; all other names are the subject's own.

        ``loss`` is the mean over the training samples of all ranks, each at the weights and in the mode of its training
        step. The mean covers the last step, this epoch so far, or the time since this rank logged it last. ``val_loss``
        is the mean over ``val_dataset``, each sample once, in evaluation mode at the current weights.
        """
        self._recorder.on_log(name, value)

    def finished(self) -> None:
        """Report that this process has trained to the end, if the trainer will kill the processes that it started.

        This writes the evidence now, including an exception that is being handled. Other processes write theirs when
        they end.
        """
        self._recorder.on_finished()


class WithLoss(NamedTuple):
    """The result of the forward. Wrappers search tuples for tensors, so it is a named tuple."""

    loss: Tensor
    logits: Any


class ModelWithLoss(nn.Module):
    """``model`` with ``loss`` inside its forward: ``forward(**batch)`` returns ``.loss`` and ``.logits``.

    If there are labels, transformers' Trainer passes ``num_items_in_batch``, the number of labels in an optimizer step,
    and expects the loss to be divided by that number, as its own models do.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, return_loss: bool = True, num_items_in_batch: Any = None, **batch: Tensor) -> WithLoss:
        """Return the loss of ``batch`` and the model's outputs. Trainers look for ``return_loss`` in the signature."""
        outputs = self.model(batch)
        loss = self.loss(outputs, batch)
        if num_items_in_batch is not None:  # the loss is a mean over this batch's labels
            loss = loss * (batch["labels"] != IGNORED).sum() / num_items_in_batch
        return WithLoss(loss, outputs)
