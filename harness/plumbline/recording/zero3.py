"""Parameters that DeepSpeed's ZeRO 3 shards: each rank holds a range of their entries, and gathers them to compute."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from torch import Tensor

from plumbline.recording.sharding import local


def is_run(parameter: Tensor) -> bool:
    """Return whether ZeRO 3 shards a parameter."""
    return hasattr(parameter, "ds_tensor")


def held(parameter: Tensor) -> Tensor:
    """Return what this rank keeps of a parameter: its range of entries, a DTensor's shard, or all of it."""
    run = getattr(parameter, "ds_tensor", None)
    return local(parameter) if run is None else run


def gathered(parameter: Tensor) -> Tensor:
    """Return a gathered copy of a parameter that ZeRO 3 shards. All ranks must call this."""
    if parameter.numel() == getattr(parameter, "ds_numel", None):  # small ones are not released between the steps
        return parameter.detach().clone()
    zero: Any = sys.modules["deepspeed"].zero
    with zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def is_hook_of_zero(hook: Any) -> bool:
    """Return whether a hook of a module gathers and releases parameters for ZeRO 3."""
    decorated = getattr(hook, "__closure__", None) or ()  # DeepSpeed's decorators keep no names
    functions = [hook]
    for cell in decorated:
        with suppress(ValueError):  # the cell is empty
            functions.append(cell.cell_contents)
    return any(str(getattr(one, "__module__", "")).startswith("deepspeed.runtime.zero.") for one in functions)
