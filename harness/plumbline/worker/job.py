"""The job: everything a subject needs to know to train one cell. This is the public interface for subjects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plumbline.core.flat_part import FlatPart
from plumbline.own_workloads.find import workload_of
from plumbline.worker.assignment import Assignment
from plumbline.worker.step_hooks import StepHooks
from plumbline.workloads import Columns, Workload

IGNORED = -100
"""The label that ``torch.nn.CrossEntropyLoss`` and transformers leave out of a loss."""


class Job:
    """One rank's view of one cell.

    Attributes:
        dataset, val_dataset: map-style datasets of dicts of tensors, each sample with its ``"index"``.
        epochs, max_steps, accumulate, clip_norm, shuffle, seed: hyper-parameters, None where unused.
        steps: optimizer steps of the whole training, for a trainer that knows no epoch (``data="iterations"``); each
            has ``accumulate`` batches.
        validate_every: evaluate on ``val_dataset`` after every so many batches, counted from the start of an epoch, or
            of the training with ``data="iterations"``: ``model.eval()`` and ``no_grad``, then go on as if nothing had
            been. None where there is no evaluation.
        unused_parameters: whether a step may leave parameters unused, everywhere or on some ranks.
        checkpoint_dir: a folder that all ranks see, None where nothing is to be saved.
        stop_after_step: save into ``checkpoint_dir`` when so many optimizer steps are done, and return. None: go on.
        resume: go on from what lies in ``checkpoint_dir``, as if training had never stopped; there may be another
            number of ranks now.
        batch_size: samples a loader of this process draws at once.
        micro_batches: how many parts of equal size a batch passes through the stages of a pipeline in; 1 elsewhere.
        global_batch_size: samples drawn at once over all processes.
        mesh: the sizes of the backend's mesh by the names of its dimensions, outermost first, as
            ``init_device_mesh`` takes them; empty on one device.
        data_rank, data_ranks: which share of each batch is this process's, and how many shares there are. Processes
            that hold parts of one replica have the same share.
        backend, precision, gpus, num_nodes: the cell; ``gpus`` is per node.
        rank, local_rank, node_rank, world_size: processes: one a device for ddp, one a node for dp and ddp2. A subject
            of ``launch="node"`` starts ``gpus`` processes a node by itself, for ddp: it reads here of the node's first
            rank, and so do they, except for a script that has a RANK of its own, which reads of that.
        device, devices: where this process computes, and all of its devices (dp, ddp2; with ``launch="node"`` all of
            the node's).
        device_ids: what ``DistributedDataParallel`` takes by that name: ``[device]`` on CUDA, None on the cpu.
        comm: ``"gloo"`` or ``"nccl"``, for ``init_process_group``.
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
        self.rank, self.local_rank, self.node_rank = (
            assignment.rank,
            assignment.local_rank,
            assignment.node_rank,
        )
        self.world_size = cell.processes

        self.devices = [torch.device(name) for name in assignment.devices]
        self.device = self.devices[0]
        self.device_ids = [self.device] if self.device.type == "cuda" else None

        devices = cell.topology.devices
        self.dataset: Columns = workload.dataset(devices, self._dtype)
        self.val_dataset: Columns = workload.val_dataset(devices, self._dtype)
        self.global_batch_size = workload.global_batch_size(devices)
        self.mesh = dict(cell.contract.mesh(cell.topology).dimensions)
        share = cell.contract.part(self.rank, cell.topology)
        self.data_rank, self.data_ranks = share.index, share.count
        self.batch_size = self.global_batch_size // self.data_ranks
        self.micro_batches = cell.contract.micro_batches
        self.epochs, self.max_steps = workload.epochs, workload.max_steps
        self.steps = workload.steps(devices)
        self.accumulate, self.clip_norm = workload.accumulate, workload.clip_norm
        self.shuffle, self.seed = workload.shuffle, workload.seed
        self.validate_every = workload.validate_every
        self.unused_parameters = workload.unused_parameters
        self.checkpoint_dir, self.resume = assignment.checkpoint_dir, assignment.resume
        self.stop_after_step = assignment.stop_after_step

    def model(self) -> nn.Module:
        """Return a new model on the cpu with the job's seeded weights; ``forward(batch: dict) -> Tensor``."""
        model = self._workload.model(self._dtype)
        self._recorder.watch(model)
        return model

    def model_with_loss(self) -> ModelWithLoss:
        """Return ``model()`` with the loss inside, for scripts that call ``model(**batch).loss``."""
        return ModelWithLoss(self.model(), self.loss)

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the scalar loss of a batch."""
        self._recorder.on_loss(batch)
        return self._workload.loss(outputs, batch)

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the workload's optimizer over ``params``.

        Raises:
            RuntimeError: the workload has several: ask for ``optimizers``.
        """
        optimizers = self._workload.optimizers(params)
        if len(optimizers) > 1:
            count = len(optimizers)
            raise RuntimeError(f"{self._workload.name} has {count} optimizers: ask for job.optimizers(params)")
        return optimizers[0]

    def optimizers(self, params: Iterable[Any]) -> list[torch.optim.Optimizer]:
        """Return the workload's optimizers, which divide ``params``, in the model's order, among themselves.

        Each of them steps once for each batch: all after one backward, or in turns, each after a pass of its own at the
        weights that the others left.
        """
        return self._workload.optimizers(params)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return the workload's learning-rate schedule for ``optimizer``, or None if it has none.

        It counts optimizer steps: ``scheduler.step()`` is due once after each one that was really taken, and not
        after one that the GradScaler skipped.
        """
        return self._workload.scheduler(optimizer)

    def trial(self) -> AbstractContextManager[None]:
        """Return a context in which forwards and optimizer steps are no training.

        A trainer measures in it what its layers cost, or makes the optimizer's state by a step over gradients of zero.
        """
        return self._recorder.paused()

    def holding(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Return a context in which this rank holds a part of the model: ``names`` of parameters and buffers.

        They are as ``model()`` has them. What other parameters and buffers contain does not matter: ranks that see the
        same samples hold the model together. After the context the model is whole again.
        """
        return self._recorder.holding(names)

    def flat_parts(self, parts: Mapping[str, FlatPart], ranks: Collection[int] | None = None) -> None:
        """Say where this rank has its part of the model, if its trainer trains flat tensors of many parameters.

        Args:
            parts: by the names of the parameters in ``model()``, this rank's part of each; those of which it has
                nothing included. Weights and gradients of a parameter that is not named are read from itself.
            ranks: whose parts make up these parameters; all ranks unless given.

        Raises:
            TraceError: a parameter is unknown, or a part exceeds it or the tensor in which it lies.
        """
        self._recorder.flat_parts(parts, range(self.world_size) if ranks is None else ranks)

    def skipped(self, optimizer: torch.optim.Optimizer, scale: float) -> None:
        """Say that the step which is due is not taken, as the trainer's own loss scaler found an overflow.

        Those that a GradScaler skips are seen anyway. Every rank says so, before the next batch.

        Args:
            optimizer: what would have stepped.
            scale: what the loss was multiplied by.
        """
        self._recorder.skipped(optimizer, scale)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's context for forward and loss; it does nothing for 32 and 64."""
        name = self._arithmetic.autocast
        return torch.autocast(self.device.type, getattr(torch, name)) if name else nullcontext()

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return the precision's GradScaler; a disabled one, which does nothing, except for 16."""
        return torch.amp.GradScaler(self.device.type, enabled=self._arithmetic.scaled)

    def log(self, name: str, value: float | Tensor) -> None:
        """Report a metric, as the trainer has it for all ranks: on every rank, or on one alone.

        Two names are held against the truth, wherever the loss is a mean over samples; any other is the subject's own.

        ``loss`` is the mean over samples that were trained on, on all ranks, each at the weights and in the mode that
        it was trained with: in the last step, in this epoch so far, or since this rank logged it last.
        ``val_loss`` is the mean over ``val_dataset``, each sample once, in evaluation mode at the present weights.
        """
        self._recorder.on_log(name, value)

    def finished(self) -> None:
        """Say that this process has trained to the end, where the trainer kills the processes that it started.

        What was recorded is written now, and so is an exception that is being handled. Any other process writes them as
        it ends.
        """
        self._recorder.on_finished()


class WithLoss(NamedTuple):
    """What the forward returns. A named tuple, because wrappers look into tuples for tensors."""

    loss: Tensor
    logits: Any


class ModelWithLoss(nn.Module):
    """``model`` with ``loss`` inside of its forward: ``forward(**batch)`` returns ``.loss`` and ``.logits``.

    Where there are labels, transformers' Trainer passes ``num_items_in_batch``, the number of labels in all that one
    optimizer step sees, and then divides by nothing else: as with its own models, the loss is divided by that number.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, return_loss: bool = True, num_items_in_batch: Any = None, **batch: Tensor) -> WithLoss:
        """Return the loss of ``batch`` and the model's outputs; ``return_loss`` is only there to be found."""
        outputs = self.model(batch)
        loss = self.loss(outputs, batch)
        if num_items_in_batch is not None:  # so far it is a mean over this batch's labels
            loss = loss * (batch["labels"] != IGNORED).sum() / num_items_in_batch
        return WithLoss(loss, outputs)
