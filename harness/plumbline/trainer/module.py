"""The base class of the user's module: its training step, optimizers and data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plumbline.trainer.environments import meet
from plumbline.trainer.strategies import split

_connections = itertools.count()


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set training or evaluation mode within the context, and restore each submodule's own mode afterwards."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


class Module(nn.Module):
    """The base class of user modules. Override ``training_step``, ``configure_optimizers``, ``train_dataloader``, etc.

    During ``fit``, the attribute ``trainer`` is the trainer, with its device, rank, world_size and optimizers.
    """

    trainer: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the scalar loss of a batch, or a dict with ``"loss"``.

        If there is a ``training_step_end``, it can return any nested tensors with the batch in dim 0. With dp and ddp2,
        the batch is one device's chunk. With several optimizers, a third argument, if this method has one, is the index
        of the optimizer that will step.
        """
        raise NotImplementedError

    def training_step_end(self, outputs: Any, *batch: Any) -> Any:
        """Compute the scalar loss, or a dict with it, from the gathered outputs of ``training_step``.

        The outputs are gathered from all devices of this process, so compute a loss over whole batches here. A second
        argument, if this method has one, is the whole batch on the first device, so ``training_step`` need not return
        labels. By default, the devices' losses are averaged.
        """
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a dict of metrics, each a mean over the batch. A single tensor is named ``val_loss``.

        Metrics are averaged over batches, devices and ranks, weighted by the number of samples.
        """
        raise NotImplementedError

    def on_metrics(self, metrics: dict[str, float]) -> None:
        """Process new metrics: ``loss`` after an epoch's last step, and ``validation_step``'s after each validation.

        This is called on all ranks, with the same metrics.
        """

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a list of optimizers, or a list of optimizers and a list of schedulers.

        A scheduler steps once per epoch. Return ``{"scheduler": s, "interval": "step"}`` for one that steps after each
        optimizer step, and ``{"scheduler": s, "monitor": "val_loss"}`` for ReduceLROnPlateau.
        """
        raise NotImplementedError

    def train_dataloader(self) -> Any:
        """Return the DataLoader to train on, as for one device. The trainer gives each rank its share by a sampler."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return the DataLoader to validate on, or None."""
        return None

    def init_ddp_connection(self, proc_rank: int, world_size: int) -> None:
        """Initialise the default process group. MASTER_ADDR and MASTER_PORT are set."""
        store = meet(proc_rank, world_size, self.trainer.plan.num_nodes)
        # torchrun's store outlives a process group. A second fit that read the first fit's keys would hang.
        prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
        store = prefixed(f"connection-{next(_connections)}", store)
        dist.init_process_group(self.trainer.plan.comm, store=store, rank=proc_rank, world_size=world_size)

    def configure_dp(self, model: nn.Module, devices: list[torch.device]) -> nn.Module:
        """Return ``model`` with a forward that splits the batch over this process's devices and gathers the outputs."""
        return split(model, devices)

    def configure_blocks(self) -> list[nn.Module] | None:
        """Return the modules (blocks) between which balanced can cut the step. None: find them by running the step.

        The step (``training_step`` with ``training_step_end``, or ``validation_step``) runs on every device. Each
        device computes only its own blocks. Before them, only the batch has values; the step ends where the next
        device's blocks begin. The step must therefore call the blocks one after another, always in the same order, each
        on outputs of the previous one. Code between blocks can use these outputs, the batch, and weights outside of
        blocks.
        """
        return None

    def while_planning(self) -> AbstractContextManager[Any]:
        """Return a context for the steps on first batches that balanced tries before training; by default none."""
        return nullcontext()

    def while_staged(self, held: frozenset[str]) -> AbstractContextManager[Any]:
        """Return a context in which balanced trains one stage; by default none.

        In it, only the parameters and buffers named by ``held`` have values on this rank. After training, the module
        has all its weights again.
        """
        return nullcontext()

    def configure_ddp(self, model: nn.Module, device_ids: list[int] | None) -> nn.Module:
        """Return ``model`` wrapped so that its backward pass averages gradients over ranks.

        Parameters that a step can leave unused need ``find_unused_parameters=True``. It is set if there are several
        optimizers, because they take turns and leave each other's parameters unused.
        """
        turns = len(self.trainer.optimizers) > 1
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=turns)
