"""The trainer's user interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plumbline.devices.calls import is_initialised
from plumbline.devices.types import device_type
from plumbline.trainer import checkpoints
from plumbline.trainer.connector import Plan, connect, make_visible
from plumbline.trainer.data_sharding import check_loader
from plumbline.trainer.environments import SlurmEnvironment
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.module import Module
from plumbline.trainer.rank_training import rank_devices, run_rank, run_ranks


class Trainer:
    """Trains a ``Module`` on one device or many.

    During and after ``fit``, ``global_step`` is the number of optimizer steps, including those that AMP skipped, and
    ``current_epoch`` the number of completed epochs. ``metrics`` holds the metrics of the last validation and the
    ``loss`` of the last step, all of them means over the samples of all ranks. ``balance`` is the plan of balanced with
    its measurements: ``print`` shows it.

    Args:
        gpus: A count, indices (``[0, 1]``, ``"0, 1"``; the string ``"3"`` is device 3), -1 for all, None for the CPU.
        num_nodes: The number of nodes, each with these gpus. ``nb_gpu_nodes`` is an older name for it.
        distributed_backend: ``"dp"`` splits each batch over the gpus of one process. ``"ddp"`` has a process for each
            gpu and averages gradients. ``"ddp2"`` averages over nodes and splits within them. ``"balanced"`` has a
            process for each gpu, with consecutive blocks of the module, chosen so that all devices take equal time
            within their memory; batches pass through them in micro-batches. None: dp for several gpus.
        accelerator: ``"cpu"`` (each gpu is simulated, -1 is the number of cores), ``"auto"``, or a device type such as
            ``"cuda"``.
        precision: 64, 32, 16 or ``"bf16"``; ``use_amp=True`` is 16.
        amp_level: ``"O0"`` float32, ``"O1"`` autocast (default for 16 bits), ``"O2"`` 16-bit weights with float32
            master weights, ``"O3"`` 16-bit weights.
        accumulate_grad_batches: The number of micro-batches per step. The mean of their losses is differentiated.
        gradient_clip_val: The maximum 2-norm of an optimizer's gradients. None or 0: no clipping.
        max_epochs: The number of epochs. None: 1, unless ``max_steps`` is given.
        max_steps: The number of optimizer steps. None: no limit.
        val_check_interval: The number of training batches between validations. None: validate after each epoch.
        checkpoint_every: The number of steps after which ``checkpoint_path`` is written (``{step}`` in it is the step).
        seed: The seed for the order of the data.
        node_rank: The index of this node if no launcher sets it. None: NODE_RANK.
        start_method: ``"fork"`` or ``"spawn"`` for ranks that the trainer starts. None: fork if there is no device.
        micro_batches: With balanced, the number of micro-batches per batch. The mean of their losses is differentiated.
            None: chosen for speed. Set it if the samples of a batch depend on each other, as through BatchNorm.
        device_memory: With balanced, the maximum bytes per device, or a list with an entry for each device. None: all
            memory of a device.
        stages: With balanced, the number of parts of the module. If it is smaller than the number of devices, replicas
            of the stages share the micro-batches of each batch. None: chosen for speed, at least 2.
        stage_timeout: With balanced, the seconds that a stage waits for another one. None: half an hour. NCCL has its
            own limit.
        oversubscribe: Whether ranks share devices if there are fewer than ``gpus``. On CUDA they communicate over gloo.

    Raises:
        MisconfigurationError: The arguments contradict each other, the machine or the launcher.
    """

    def __init__(
        self,
        gpus: int | str | Sequence[int] | None = None,
        num_nodes: int = 1,
        distributed_backend: str | None = None,
        *,
        nb_gpu_nodes: int | None = None,
        accelerator: str = "auto",
        precision: int | str | None = None,
        use_amp: bool = False,
        amp_level: str | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        val_check_interval: int | None = None,
        checkpoint_every: int | None = None,
        checkpoint_path: str | Path | None = None,
        seed: int = 0,
        node_rank: int | None = None,
        start_method: str | None = None,
        oversubscribe: bool = False,
        micro_batches: int | None = None,
        device_memory: int | Sequence[int] | None = None,
        stages: int | None = None,
        stage_timeout: float | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name != "self"}
        self.plan: Plan = connect(**options)
        self.global_step = 0
        self.current_epoch = 0
        self.metrics: dict[str, float] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.device = torch.device("cpu")
        self.rank = 0
        self.world_size = self.plan.world_size
        self.checkpoint: Callable[[], dict[str, Any]] | None = None
        self.balance: Any = None
        self.stage_file: str | None = None  # where a rank writes its stage's name, for the process that started it
        self._devices_shown = False

    def fit(self, module: Module, ckpt_path: str | Path | None = None) -> None:
        """Train ``module``. With ``ckpt_path``, resume from that checkpoint, even in the middle of an epoch.

        Raises:
            MisconfigurationError: The module, its data or the checkpoint cannot be trained this way.
            RankError: A rank that this process started has failed.
        """
        check_module(module, ckpt_path)
        self.global_step, self.current_epoch, self.metrics = 0, 0, {}
        self.optimizers, self.checkpoint, self.balance = [], None, None
        self._show_devices()
        module.trainer = self
        try:
            self._fit(module, ckpt_path)
        finally:
            module.trainer = None  # so that saving or copying the module does not include the trainer

    def plan_stages(self, module: Module) -> Any:
        """Return the plan by which balanced would distribute ``module``, without training. ``print`` shows a table.

        The result's ``plan.picture()`` is an SVG of one step.

        Raises:
            MisconfigurationError: The module or its data cannot be trained this way.
        """
        from plumbline.trainer.balanced.planning import plan_without_training  # only this backend needs it

        if not self.plan.backend.stages:
            raise MisconfigurationError("Only distributed_backend='balanced' plans stages: create the Trainer with it.")
        check_module(module, None)
        self._show_devices()
        return plan_without_training(self, module, rank_devices(self.plan, 0)[0])

    def save_checkpoint(self, path: str | Path) -> None:
        """Write a checkpoint of the last completed step on rank 0. Other ranks write nothing.

        With balanced, all ranks must call this during ``fit``, because each has a part of the module.
        """
        if self.checkpoint is None:
            raise MisconfigurationError("There is nothing to save yet: call fit first.")
        if self.rank == 0 or self.plan.backend.stages:
            checkpoint = self.checkpoint()
            if self.rank == 0:
                checkpoints.write(checkpoint, path)

    def _fit(self, module: Module, ckpt_path: str | Path | None) -> None:
        environment, per_node = self.plan.environment, self.plan.processes_per_node
        if environment.starts_ranks and per_node > 1 and not dist.is_initialized():
            self._check_data(module)
            final = run_ranks(self, module, ckpt_path)
            self.plan.precision(self.plan.dtype, "cpu").convert(module)
            module.load_state_dict(final["module"])
            checkpoints.restore_progress(final, self)
            if "balance" in final:
                from plumbline.trainer.balanced.stage_plan import Balance  # only this backend needs it

                self.balance = Balance.from_dict(final.pop("balance"))
            self.checkpoint = lambda: final
            return
        # This process is a rank, started by a launcher or by the user, who has initialised a process group.
        own_group = environment.starts_ranks and dist.is_initialized()
        run_rank(self, module, dist.get_rank() % per_node if own_group else environment.local_rank(), ckpt_path)

    def _show_devices(self) -> None:
        slurm = isinstance(self.plan.environment, SlurmEnvironment)
        shares = self.plan.shared is not None
        accelerator = self.plan.accelerator
        if accelerator != "cpu" and not slurm and not shares and not self._devices_shown:
            visible = os.environ.get(device_type(accelerator).visible or "")
            changes, devices = make_visible(accelerator, self.plan.devices, visible, is_initialised(accelerator))
            os.environ.update(changes)
            self.plan = replace(self.plan, devices=devices)
            self._devices_shown = True

    def _check_data(self, module: Module) -> None:
        for training in (True, False):
            try:
                loader = module.train_dataloader() if training else module.val_dataloader()
            except Exception:
                continue  # it might need a rank's process group; otherwise the rank raises the same error
            if loader is not None:
                check_loader(loader, self.plan, training)
                if training and self.plan.micro_batches is not None:
                    # Only this backend needs it.
                    from plumbline.trainer.balanced.pipeline_batches import possible_micro_batches

                    possible_micro_batches(loader, self.plan.micro_batches)


def check_module(module: Module, ckpt_path: Any) -> None:
    if not isinstance(module, Module):
        raise MisconfigurationError(f"fit was given a {type(module).__name__}: give it a subclass of Module.")
    needed = ["training_step", "configure_optimizers", "train_dataloader"]
    if type(module).val_dataloader is not Module.val_dataloader:
        needed.append("validation_step")
    for hook in needed:
        if getattr(type(module), hook) is getattr(Module, hook):
            raise MisconfigurationError(f"{type(module).__name__} has no {hook}: write that method.")
    if ckpt_path is not None and not os.path.isfile(ckpt_path):
        raise MisconfigurationError(f"There is no checkpoint {str(ckpt_path)!r}: give the path of one, or None.")
