"""Starts this node's ranks and returns what they trained."""

from __future__ import annotations

import importlib
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from plumbline.trainer.checkpoints import read
from plumbline.trainer.errors import MisconfigurationError, RankError
from plumbline.trainer.module import Module
from plumbline.trainer.rank_training import drawn_seed, run_rank


def run_ranks(trainer: Any, module: Module, ckpt_path: Any) -> dict[str, Any]:
    """Train in one process for each device of this node; return the last checkpoint.

    Raises:
        RankError: A rank failed; the others have been ended.
    """
    plan = trainer.plan
    environment = plan.environment
    meeting = {"MASTER_ADDR": environment.main_address(), "MASTER_PORT": str(environment.main_port())}
    if plan.start_method == "fork":
        importlib.import_module("torch._dynamo")  # DDP needs it: a second here, once, instead of in each rank
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
            for file in context.error_files:  # torch leaves the one of each rank that raised
                Path(file).unlink(missing_ok=True)
        if not os.path.exists(result):
            raise RankError(f"Rank {first} ended without a result: its code called exit.", first)
        return read(result)


def _name(rank: int, result: str) -> str:
    stage = Path(stage_file(result, rank))
    return f"Rank {rank}, {stage.read_text('utf-8')}," if stage.exists() else f"Rank {rank}"


def stage_file(result: str, rank: int) -> str:
    """Return the file in which a rank writes the name of its stage."""
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
        # One thread a rank, as torchrun does. After a fork it must be one: the parent's OpenMP threads are
        # not here, and a parallel region that counts on them hangs.
        torch.set_num_threads(1)
    torch.manual_seed(seed)
    own_memory(module)
    rank = plan.environment.rank(local_rank, plan.processes_per_node)
    os.environ.update(meeting, RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(plan.world_size))
    plan.environment.variables.update(meeting)
    trainer.stage_file = stage_file(result, rank)
    run_rank(trainer, module, local_rank, ckpt_path, result + ("" if local_rank == 0 else f".{local_rank}"))


def own_memory(module: torch.nn.Module) -> None:
    """Copy weights and buffers to memory of this rank's own.

    Pickled tensors arrive in shared memory, and a fork keeps shared what was shared before: ranks would step one copy.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
