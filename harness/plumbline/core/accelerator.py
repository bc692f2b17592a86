"""The accelerators: CUDA devices, or the cpu, which simulates every device."""

from __future__ import annotations

from plumbline.core.errors import PlanError

ACCELERATORS = ("cpu", "cuda")


def resolve_accelerator(requested: str, cuda_devices: int) -> str:
    """Return the accelerator for ``--accelerator``, which may be ``auto``, on a machine with so many CUDA devices.

    Raises:
        PlanError: CUDA is requested, and there is no CUDA device.
    """
    if requested == "auto":
        return "cuda" if cuda_devices else "cpu"
    if requested == "cuda" and not cuda_devices:
        raise PlanError("--accelerator cuda: there is no CUDA device here; take --accelerator cpu")
    return requested
