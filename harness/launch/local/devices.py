"""The CUDA devices of this machine, by names that every process has for them, whichever it sees in whatever order."""

from __future__ import annotations

import os

import torch

from harness.core.cell import Cell


def devices_of(cell: Cell, oversubscribe: bool) -> tuple[str, ...]:
    """Return the devices that a launch of ``cell`` on this machine alone would use; none where they are simulated."""
    if cell.accelerator != "cuda":
        return ()
    present = torch.cuda.device_count()
    used = present if oversubscribe else cell.topology.num_nodes * cell.topology.gpus
    return tuple(map(_name, range(min(used, present))))


def _name(index: int) -> str:
    """Return a device's own number, or, with a torch that does not tell it, its place among those that are visible."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        return f"GPU {uuid}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"GPU {visible.split(',')[index].strip() if visible else index}"
