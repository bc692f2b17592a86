"""Reads the evidence that ranks wrote. Nothing in it is ever executed."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from harness.core.errors import TraceError
from harness.core.trace import RankTrace, unflatten


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
