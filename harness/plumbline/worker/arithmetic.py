"""Makes CUDA devices compute in the precision that the cell names, while they are recorded.

By default torch computes float32 convolutions in TF32 on a CUDA device (10 bits of mantissa), and lets cuBLAS reduce
16-bit products in 16 bits. Both are less exact than what the judge measures as the rounding noise of the precision, so
a right trainer would be found wrong. A subject may allow them again: then its gradients are those of TF32, and are
judged as what they are. https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
"""

from __future__ import annotations

import torch


def compute_as_named() -> None:
    """Turn TF32 and 16-bit reductions off for this process. Does not start CUDA."""
    # The older switches are there in every torch; cuDNN's stands for convolutions and recurrent layers.
    torch.backends.cudnn.allow_tf32 = False
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
