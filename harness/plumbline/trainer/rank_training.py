"""Trains as one rank, or starts this node's ranks."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from plumbline.devices.calls import seed as seed_device
from plumbline.devices.calls import set_current
from plumbline.trainer import checkpoints
from plumbline.trainer.checkpoints import TrainingState, read
from plumbline.trainer.connector import Plan
from plumbline.trainer.environments import check_rendezvous
from plumbline.trainer.errors import MisconfigurationError, RankError
from plumbline.trainer.loop import ModuleEngine, RankResources, train
from plumbline.trainer.module import Module
from plumbline.trainer.optimizers import parameters_of
from plumbline.trainer.step import StepModule


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
