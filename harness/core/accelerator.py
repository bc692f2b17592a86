"""The accelerators: CUDA devices, or the cpu, which simulates every device."""

from __future__ import annotations

ACCELERATORS = ("cpu", "cuda")
