"""Reads the evidence that ranks wrote. Nothing in it is ever executed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from harness.core.errors import TraceError
from harness.core.trace import RankTrace, Trace, unflatten

SAVED, RESUMED = "saved", "resumed"
"""Folders, beside the evidence of the uninterrupted launch, of the launches that stop and go on."""


def read_trace(folder: Path) -> Trace:
    """Return what the launches of one cell left in ``folder``, in the order of the ranks.

    Raises:
        TraceError: a file is not a trace, or a rank between others left none; the sentence names it.
    """
    return replace(
        _read_launch(folder),
        saved=_read_launch(folder / SAVED) if (folder / SAVED).is_dir() else None,
        resumed=_read_launch(folder / RESUMED) if (folder / RESUMED).is_dir() else None,
    )


def _read_launch(folder: Path) -> Trace:
    # A rank leaves a log in any case, and evidence only if it ends well.
    ranks = sorted({int(file.stem.removeprefix("rank-")) for file in folder.glob("rank-*")})
    files = {rank: folder / f"rank-{rank}.safetensors" for rank in ranks or [0]}
    absent = [str(rank) for rank, file in files.items() if not file.is_file()]
    if absent:
        raise TraceError(f"no evidence of rank {', '.join(absent)}, which did not end well")
    return Trace(tuple(read_rank(file) for file in files.values()))


def read_rank(path: Path) -> RankTrace:
    """Return one rank's trace.

    Raises:
        TraceError: the file is missing, truncated or not a trace; the sentence names it.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return unflatten(json.loads(metadata["plumbline"]), tensors)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise TraceError(
            f"{path} is not a whole trace ({type(error).__name__}: {error}); run the cell again"
        ) from error
