"""Reads what the processes of a checked command wrote."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from torch import Tensor

from plumbline.check.evidence.options import FILE, GROUP, read_options
from plumbline.check.evidence.training import BackwardPass, Parameter, RecordedRank, RecordedStep, RecordedTraining
from plumbline.core.errors import TraceError
from plumbline.evidence.read import read_file


def read_trainings(folder: Path) -> list[RecordedTraining]:
    """Return the trainings recorded in ``folder``: usually one, or none if no optimizer took a step.

    The ranks of a process group make one training. Each process without a group makes a training of its own. A file
    that cannot be read raises ``TraceError``, which names it.
    """
    groups: dict[tuple[int, str], list[RecordedRank]] = defaultdict(list)
    for own in sorted(folder.glob("rank-*-*"), key=lambda path: [int(part) for part in path.name.split("-")[1:]]):
        rank = _read_rank(own)
        if rank is not None:
            group = next((one.name for one in own.glob(f"{GROUP}*")), "") if rank.world_size > 1 else own.name
            groups[rank.world_size, group].append(rank)
    objective = read_options(str(folder)).objective if (folder / FILE).is_file() else ""
    return [RecordedTraining(tuple(sorted(ranks, key=lambda one: one.rank)), objective) for ranks in groups.values()]


def world_size_of(folder: Path) -> int:
    """Return the number of ranks of the training in ``folder``, or 0 as long as no step is written.

    A file that cannot be read raises ``TraceError``, which names it.
    """
    steps = next(iter(sorted(folder.glob("rank-*-*/step-*.safetensors"))), None)
    return 0 if steps is None else int(_read(steps)[0]["world_size"])


def _read_rank(folder: Path) -> RecordedRank | None:
    steps = sorted(folder.glob("step-*.safetensors"))
    if not steps:
        return None
    recorded = [_read(path) for path in steps]
    end = _read(folder / "end.safetensors")[0] if (folder / "end.safetensors").is_file() else {}
    later = _read(folder / "later.safetensors")[0] if (folder / "later.safetensors").is_file() else {}
    first = recorded[0][0]
    return RecordedRank(
        first["rank"],
        max(values["world_size"] for values, _ in recorded),
        tuple(_step(values, tensors) for values, tensors in recorded),
        {**end.get("facts", {}), **later.get("facts", {})},
        end.get(
            "error",
            "" if end else "its recording is incomplete: the process was killed, or is still recording",
        ),
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        return read_file(path)
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise TraceError(
            f"{path} is incomplete or damaged ({type(error).__name__}: {error}); run the command again"
        ) from error


def _step(values: dict[str, Any], tensors: dict[str, Tensor]) -> RecordedStep:
    return RecordedStep(
        values["optimizer"],
        values["number"],
        tuple(Parameter(**{**one, "shape": tuple(one["shape"])}) for one in values["parameters"]),
        tensors["received"],
        _passes("pass", values["passes"], tensors),
        _passes("other", values["other_passes"], tensors),
        values["skipped"],
        values["facts"],
        values["norm"],
        tensors.get("unclipped"),
        tensors.get("replaced"),
        tensors.get("left"),
    )


def _passes(kind: str, values: list[dict[str, Any]], tensors: dict[str, Tensor]) -> tuple[BackwardPass, ...]:
    return tuple(
        BackwardPass(
            one["number"],
            tensors[f"{kind} {index}/local"],
            tensors.get(f"{kind} {index}/exact"),
            one["scale"],
            one["facts"],
            tensors.get(f"{kind} {index}/native"),
        )
        for index, one in enumerate(values)
    )
