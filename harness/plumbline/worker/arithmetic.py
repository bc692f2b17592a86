"""Makes CUDA devices compute in the cell's precision while they are recorded.

By default, torch computes float32 convolutions on CUDA in TF32 (10 bits of mantissa), and cuBLAS may reduce 16-bit
products in 16 bits. Both are less accurate than the rounding noise that the judge measures, so a correct trainer would
fail. A subject may turn them on again; its gradients are then judged with their TF32 errors.
https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
"""

from __future__ import annotations

import torch


def compute_as_named() -> None:
    """Turn off TF32 and 16-bit reductions in this process. Does not start CUDA."""
    # Every torch has these switches. cuDNN's is for convolutions and recurrent layers.
    torch.backends.cudnn.allow_tf32 = False
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
