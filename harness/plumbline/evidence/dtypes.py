"""The name of a dtype in evidence."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype without the module's, as ``bfloat16``; "" for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")
