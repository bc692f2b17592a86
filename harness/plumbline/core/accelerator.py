"""The accelerators: CUDA devices, or the CPU, which simulates devices."""

from __future__ import annotations

from plumbline.core.errors import PlanError

ACCELERATORS = ("cpu", "cuda")


def resolve_accelerator(requested: str, cuda_devices: int) -> str:
    """Return the accelerator for ``--accelerator``, which may be ``auto``."""
    if requested == "auto":
        return "cuda" if cuda_devices else "cpu"
    if requested == "cuda" and not cuda_devices:
        raise PlanError("--accelerator cuda: this machine has no CUDA device; use --accelerator cpu")
    return requested
