"""Peak floating-point operations per second from the makers' data sheets, for dense matrices.

The figures are for 16-bit products with 32-bit sums on tensor cores. Precision 32 has no single peak: torch computes
matrix products in float32 and convolutions in TF32, whose peaks differ eightfold. Mixtures of 8 and 16 bits have none
either. A CPU has no stated peak because its clock is unknown.

The figures were looked up on 2026-11-23 in copies and quotations of the documents that they name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Peak:
    """Operations per second of one device, and the document that states them."""

    flops: float
    source: str


_H100: Final = "NVIDIA H100 Tensor Core GPU data sheet, BFLOAT16 {} TFLOPS with sparsity, halved"

_PEAKS: Final = (
    (r"B200", 2250e12, "NVIDIA HGX B200 data sheet, FP16/BF16 4.5 PFLOPS with sparsity, halved"),
    (r"H200(?! NVL)", 989.5e12, "NVIDIA H200 Tensor Core GPU data sheet, BFLOAT16 1,979 TFLOPS with sparsity, halved"),
    (r"GH200", 989.5e12, "NVIDIA GH200 Grace Hopper Superchip data sheet, BFLOAT16 1,979 TFLOPS with sparsity, halved"),
    (r"H100 NVL", 835.5e12, _H100.format("1,671")),
    (r"H100 PCIe", 756.5e12, _H100.format("1,513")),
    (r"H100 80GB HBM3", 989.5e12, _H100.format("1,979")),
    (r"A100", 312e12, "NVIDIA A100 Tensor Core GPU data sheet, BFLOAT16 312 TFLOPS"),
    (r"L40S", 362.05e12, "NVIDIA L40S data sheet, BFLOAT16 362.05 TFLOPS"),
    (r"L4", 121e12, "NVIDIA L4 data sheet, BFLOAT16 242 TFLOPS with sparsity, halved"),
    (r"A10", 125e12, "NVIDIA A10 data sheet, BFLOAT16 125 TFLOPS"),
    (r"V100-SXM2", 125e12, "NVIDIA V100 data sheet, tensor performance 125 TFLOPS with NVLink"),
    (r"V100-PCIE", 112e12, "NVIDIA V100 data sheet, tensor performance 112 TFLOPS with PCIe"),
    (r"T4", 65e12, "NVIDIA T4 data sheet, mixed precision (FP16/FP32) 65 TFLOPS"),
)
OF_A_CPU: Final = "a CPU has no stated peak, because its clock is unknown"
_PRECISIONS: Final = ("16", "bf16")
_WITHOUT_BF16: Final = ("V100", "T4")


def peak_of(device: str | None, precision: str) -> Peak | str:
    """Return the peak of a device, by its name in nvidia-smi, or the reason why there is none."""
    if device is None:
        return "the name of the device is unknown"
    if precision in ("32", "64"):
        return f"precision {precision} has no single peak on a GPU: matrix products and convolutions differ"
    if precision not in _PRECISIONS:
        return f"precision {precision} mixes widths that have different peaks"
    of_nvidia = "NVIDIA" in device.upper() or "TESLA" in device.upper()
    for pattern, flops, source in _PEAKS if of_nvidia else ():
        if re.search(rf"(?<![A-Z0-9]){pattern}(?![A-Z0-9])", device):
            if precision == "bf16" and any(name in device for name in _WITHOUT_BF16):
                return f"{device} does not compute in bf16"
            return Peak(flops, source)
    return f"the peak of {device} is unknown: plumbline/machine/peak_flops.py lists the known devices"
