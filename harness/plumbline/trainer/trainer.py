"""The trainer's user interface."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from plumbline.devices.calls import is_initialised, set_current
from plumbline.devices.calls import seed as seed_device
from plumbline.devices.types import device_type
from plumbline.trainer import checkpoints
from plumbline.trainer.checkpoints import TrainingState, read
from plumbline.trainer.connector import Plan, connect, make_visible
from plumbline.trainer.data_sharding import check_loader
from plumbline.trainer.environments import SlurmEnvironment, check_rendezvous
from plumbline.trainer.errors import MisconfigurationError, RankError
from plumbline.trainer.loop import ModuleEngine, RankResources, StepModule, train
from plumbline.trainer.module import Module
from plumbline.trainer.optimizers import parameters_of


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


def run_rank(trainer: Any, module: Module, local_rank: int, ckpt_path: Any, result_path: str | None = None) -> None:
    """Train as one rank. Store the result in ``trainer`` and ``module``, and in ``result_path`` if that is given."""
    plan = trainer.plan
    trainer.rank = plan.environment.rank(local_rank, plan.processes_per_node)
    trainer.world_size = plan.world_size
    devices = rank_devices(plan, local_rank)
    trainer.device = devices[0]
    set_current(devices[0])
    opened = join_ranks(trainer, module) if plan.backend.synchronises else False
    seed_devices(trainer.rank, devices)
    try:
        if plan.backend.stages:
            from plumbline.trainer.balanced.stage_training import train_stage  # only this backend needs it

            train_stage(trainer, module, devices[0], ckpt_path)
        else:
            _train(trainer, module, devices, ckpt_path)
        if result_path is not None:  # written before anything is shut down, so that it is safe
            result = trainer.checkpoint()
            if trainer.balance is not None:
                result = {**result, "balance": trainer.balance.as_dict()}
            checkpoints.write(result, result_path)
    except BaseException as error:
        # A rank that the trainer started just ends, which its parent notices at once. Otherwise destroy the process
        # group, so that the other ranks' next all-reduce fails instead of waiting. Clear the frames first: they refer
        # to the DDP object, which must be deleted before that. Leave an NCCL group to the launcher, because destroying
        # it would wait for the other ranks.
        if opened and result_path is None and (plan.comm == "gloo" or trainer.world_size == 1):
            traceback.clear_frames(error.__traceback__)
            leave_ranks()
        raise
    if opened:
        leave_ranks()


def _train(trainer: Any, module: Module, devices: list[torch.device], ckpt_path: Any) -> None:
    plan = trainer.plan
    precision = plan.precision(plan.dtype, plan.accelerator)
    precision.convert(module)
    module.to(devices[0])
    state = TrainingState(module, precision)
    train_loader, val_loader = state.prepare(trainer)
    trainer.optimizers = state.optimizers
    trainer.checkpoint = partial(checkpoints.capture, trainer, state)
    weights = [parameters_of(optimizer) for optimizer in state.optimizers]

    evaluate = forward = module.configure_dp(StepModule(module, precision), devices)
    if plan.backend.synchronises:
        one_device = plan.accelerator != "cpu" and not plan.backend.splits
        forward = module.configure_ddp(forward, [devices[0].index] if one_device else None)
        # From here on, all ranks have rank 0's weights.
    precision.prepare(state.optimizers)
    if ckpt_path is not None:
        checkpoints.restore(checkpoints.read(ckpt_path), trainer, state)
    engine = ModuleEngine(forward, module, precision, splits=len(devices) > 1)
    train(trainer, state, RankResources(engine, evaluate, devices, train_loader, val_loader, weights))
    engine.share_buffers()


def rank_devices(plan: Plan, local_rank: int) -> list[torch.device]:
    """Return the devices of one rank. Simulated devices are all the CPU."""
    mine = plan.devices if plan.backend.splits else plan.devices[local_rank : local_rank + 1]
    if plan.shared is not None:
        mine = tuple(index % plan.shared for index in mine)
    simulated = plan.accelerator == "cpu"
    return [torch.device("cpu") if simulated else torch.device(plan.accelerator, index) for index in mine]


def join_ranks(trainer: Any, module: Module) -> bool:
    """Initialise the process group unless there is one. Return whether it was initialised here."""
    opened = not dist.is_initialized()
    if opened:
        environment = trainer.plan.environment
        if environment.starts_ranks and trainer.plan.num_nodes > 1:
            check_rendezvous(trainer.rank, trainer.world_size, environment.main_address(), environment.main_port())
        os.environ.update(MASTER_ADDR=environment.main_address(), MASTER_PORT=str(environment.main_port()))
        module.init_ddp_connection(trainer.rank, trainer.world_size)
    if not dist.is_initialized() or dist.get_world_size() != trainer.world_size:
        raise MisconfigurationError(
            f"After init_ddp_connection there should be a process group of {trainer.world_size} ranks, but "
            f"there is {f'one of {dist.get_world_size()}' if dist.is_initialized() else 'none'}: initialise it for "
            "all ranks."
        )
    trainer.rank = dist.get_rank()
    return opened


def leave_ranks() -> None:
    """Destroy the process group.

    The DDP object must be deleted before: its destructor waits for a gloo thread, which can be waiting for the GIL.
    """
    gc.collect()
    dist.destroy_process_group()


def drawn_seed() -> int:
    """Draw a seed from torch's generator, so that it depends on the user's seed and differs between calls of fit."""
    return int(torch.empty((), dtype=torch.int64).random_())


def seed_devices(rank: int, devices: list[torch.device]) -> None:
    """Seed each device differently, so that dropout masks differ.

    The first device of rank 0 keeps the state of the user's generator.
    """
    if rank == 0 and len(devices) == 1:
        return
    seed = drawn_seed()
    if rank:
        torch.default_generator.manual_seed(seed + rank * len(devices))
    for number, device in enumerate(devices):
        if device.type != "cpu" and (rank or number):
            seed_device(device, seed + rank * len(devices) + number)


def run_ranks(trainer: Any, module: Module, ckpt_path: Any) -> dict[str, Any]:
    """Train in one process per device of this node, and return the final checkpoint."""
    plan = trainer.plan
    environment = plan.environment
    meeting = {"MASTER_ADDR": environment.main_address(), "MASTER_PORT": str(environment.main_port())}
    if plan.start_method == "fork":
        importlib.import_module("torch._dynamo")  # DDP needs it; the import takes a second once, not in each rank
    first = environment.rank(0, plan.processes_per_node)
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        result = str(Path(folder) / "result.ckpt")
        arguments = (trainer, module, ckpt_path, meeting, result, drawn_seed())
        try:
            context: Any = start_processes(  # type: ignore[no-untyped-call]
                _rank, arguments, plan.processes_per_node, join=False, start_method=plan.start_method
            )
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise MisconfigurationError(
                f"The module cannot be sent to spawned ranks ({error}): define it at the top of an importable file."
            ) from error
        try:
            while not context.join():
                pass
        except ProcessRaisedException as error:
            trace = str(error).partition("error:\n")[2].strip()
            rank = first + error.error_index
            failed = f"{_name(rank, result)} failed: {trace.splitlines()[-1]}"
            raise RankError(f"{failed}\n\n{trace}", rank) from None
        except ProcessExitedException as error:
            rank = first + error.error_index
            sentence = f"{_name(rank, result)} ended before its training was complete: {error}"
            if error.signal_name == "SIGKILL":
                sentence += " (the machine may have run out of memory)"
            raise RankError(sentence, rank) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                    process.join()
            for file in context.error_files:  # torch does not delete the files of ranks that raised
                Path(file).unlink(missing_ok=True)
        if not os.path.exists(result):
            raise RankError(f"Rank {first} ended without a result: its code called exit.", first)
        return read(result)


def _name(rank: int, result: str) -> str:
    stage = Path(stage_file(result, rank))
    return f"Rank {rank}, {stage.read_text('utf-8')}," if stage.exists() else f"Rank {rank}"


def stage_file(result: str, rank: int) -> str:
    return f"{result}.stage{rank}"


def _rank(
    local_rank: int,
    trainer: Any,
    module: Module,
    ckpt_path: Any,
    meeting: dict[str, str],
    result: str,
    seed: int,
) -> None:
    plan = trainer.plan
    if plan.accelerator == "cpu":
        # One thread per rank, as with torchrun. After a fork it must be one: the parent's OpenMP threads do not exist
        # in this process, and a parallel region that uses them hangs.
        torch.set_num_threads(1)
    torch.manual_seed(seed)
    # Pickled tensors arrive in shared memory, and tensors that were in shared memory stay there after a fork. Without
    # these copies, all ranks would update the same weights.
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
    rank = plan.environment.rank(local_rank, plan.processes_per_node)
    os.environ.update(meeting, RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(plan.world_size))
    plan.environment.variables.update(meeting)
    trainer.stage_file = stage_file(result, rank)
    run_rank(trainer, module, local_rank, ckpt_path, result + ("" if local_rank == 0 else f".{local_rank}"))
