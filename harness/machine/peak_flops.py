"""The most floating-point operations a second that a device does by its maker's data sheet, for dense matrices.

Only for 16-bit products with 32-bit sums on tensor cores. There is no figure for precision 32: torch computes matrix
products in float32 there and convolutions in TF32, whose peaks differ eightfold; none for a CPU, whose clock is not
known; and none for a mixture of 8 and 16 bits, which has no one peak.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Peak:
    """Operations a second of one device, and where that is written."""

    flops: float
    source: str


_HOPPER: Final = "NVIDIA H100 Tensor Core GPU data sheet (half of the figure with sparsity)"

_PEAKS: Final = (
    (r"B200", 2250e12, "NVIDIA DGX B200 data sheet (an eighth, half of the figure with sparsity)"),
    (r"H200 NVL", 835.5e12, "NVIDIA H200 Tensor Core GPU data sheet (half of the figure with sparsity)"),
    (r"H200", 989.5e12, "NVIDIA H200 Tensor Core GPU data sheet (half of the figure with sparsity)"),
    (r"GH200", 989.5e12, "NVIDIA GH200 Grace Hopper Superchip data sheet (half of the figure with sparsity)"),
    (r"H100 NVL", 835.5e12, _HOPPER),
    (r"H100 PCIe", 756.5e12, _HOPPER),
    (r"H100 80GB HBM3", 989.5e12, _HOPPER),
    (r"A100", 312e12, "NVIDIA A100 Tensor Core GPU data sheet"),
    (r"L40S", 362e12, "NVIDIA L40S data sheet (half of the figure with sparsity)"),
    (r"L4", 121e12, "NVIDIA L4 data sheet (half of the figure with sparsity)"),
    (r"A10", 125e12, "NVIDIA A10 data sheet"),
    (r"V100-SXM2", 125e12, "NVIDIA V100 data sheet"),
    (r"V100-PCIE", 112e12, "NVIDIA V100 data sheet"),
    (r"T4", 65e12, "NVIDIA T4 data sheet"),
)
_PRECISIONS: Final = ("16", "bf16")
_WITHOUT_BF16: Final = ("V100", "T4")


def peak_of(device: str | None, precision: str) -> Peak | None:
    """Return the peak of a device by its name, as nvidia-smi gives it; None where there is none, or it is not known."""
    if (
        device is None
        or precision not in _PRECISIONS
        or ("NVIDIA" not in device.upper() and "TESLA" not in device.upper())
    ):
        return None
    for pattern, flops, source in _PEAKS:
        if re.search(rf"(?<![A-Z0-9]){pattern}(?![A-Z0-9])", device):
            lacks = precision == "bf16" and any(name in device for name in _WITHOUT_BF16)
            return None if lacks else Peak(flops, source)
    return None
