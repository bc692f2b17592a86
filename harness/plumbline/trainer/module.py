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
    """Set training or evaluation mode, and restore each module's own mode afterwards."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


class Module(nn.Module):
    """The base class: override ``training_step``, ``configure_optimizers``, ``train_dataloader``, and more.

    During ``fit`` the attribute ``trainer`` is the trainer; it knows device, rank, world_size and optimizers.
    """

    trainer: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the scalar loss of a batch, or a dict with ``"loss"``.

        With ``training_step_end`` it may return anything made of tensors with the batch in dim 0. Under dp
        and ddp2 the batch is one device's chunk. With several optimizers a third argument, if there is one,
        is the index of the optimizer whose turn it is.
        """
        raise NotImplementedError

    def training_step_end(self, outputs: Any, *batch: Any) -> Any:
        """Return the scalar loss, or a dict with it, of the outputs of ``training_step``.

        They are gathered from all devices of this process: a loss over whole batches belongs here. A second
        argument, if there is one, is the batch, whole and on the first device: so labels need not be handed on by
        ``training_step``, split and joined again. By default the devices' losses are averaged.
        """
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a dict of metrics, each a mean over the batch; a bare tensor is called ``val_loss``.

        Over batches, devices and ranks they are averaged with the number of samples as weights.
        """
        raise NotImplementedError

    def on_metrics(self, metrics: dict[str, float]) -> None:
        """Do something with new metrics: ``loss`` after an epoch's last step, those of ``validation_step`` after it.

        They are the same on all ranks, and this is called on each of them.
        """

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a list of them, or a list of optimizers and a list of schedulers.

        A scheduler steps once an epoch; as ``{"scheduler": s, "interval": "step"}`` it does after each
        optimizer step. ReduceLROnPlateau is given as ``{"scheduler": s, "monitor": "val_loss"}``.
        """
        raise NotImplementedError

    def train_dataloader(self) -> Any:
        """Return the DataLoader to train on, as for one device: ranks get their share by a sampler."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return the DataLoader to validate on, or None."""
        return None

    def init_ddp_connection(self, proc_rank: int, world_size: int) -> None:
        """Open the process group; MASTER_ADDR and MASTER_PORT are set."""
        store = meet(proc_rank, world_size, self.trainer.plan.num_nodes)
        # torchrun's store outlives a process group: a second fit that read the first one's keys would hang.
        prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
        store = prefixed(f"connection-{next(_connections)}", store)
        dist.init_process_group(self.trainer.plan.comm, store=store, rank=proc_rank, world_size=world_size)

    def configure_dp(self, model: nn.Module, devices: list[torch.device]) -> nn.Module:
        """Return ``model`` such that its forward spreads the batch over this process's devices, and gathers."""
        return split(model, devices)

    def configure_blocks(self) -> list[nn.Module] | None:
        """Return the modules that balanced may part the step between, or None: they are found by running the step.

        The step (``training_step``, with ``training_step_end``; ``validation_step``) runs on every device. Each device
        computes its own blocks: before them there are no values but the batch's, and the step ends where the next
        device begins. So the step calls the blocks one after the other, each on outputs of the one before, always in
        the same order; code between them may use these, the batch, and weights that are in no block.
        """
        return None

    def while_planning(self) -> AbstractContextManager[Any]:
        """Return a context in which balanced tries steps on their first batches, before it trains; by default none."""
        return nullcontext()

    def while_staged(self, held: frozenset[str]) -> AbstractContextManager[Any]:
        """Return a context in which balanced trains one stage; by default none.

        On this rank the parameters and buffers ``held``, by their names in this module, have values then; in others
        are none. After it the module is whole again.
        """
        return nullcontext()

    def configure_ddp(self, model: nn.Module, device_ids: list[int] | None) -> nn.Module:
        """Return ``model`` wrapped such that its backward averages gradients over ranks.

        Parameters that a step may leave unused need ``find_unused_parameters=True`` here. Optimizers that
        take turns leave each other's unused, so then it is set.
        """
        turns = len(self.trainer.optimizers) > 1
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=turns)
