"""Matrix products and convolutions in TF32, which CUDA devices can use for float32 tensors.

https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CUT = 23 - 10
"""The number of mantissa bits that float32 has in addition to TF32's."""


def truncated(values: Tensor) -> Tensor:
    """Return ``values`` as the tensor cores read them: the bits beyond TF32's are cut off."""
    return _without_last_bits(values.float().view(torch.int32), values)


def nearest(values: Tensor) -> Tensor:
    """Return ``values`` rounded to the nearest TF32 number."""
    return _without_last_bits(values.float().view(torch.int32) + (1 << (_CUT - 1)), values)


def _without_last_bits(bits: Tensor, values: Tensor) -> Tensor:
    return (bits >> _CUT << _CUT).view(torch.float32).to(values.dtype)


class ProductsInTf32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the factors of matrix products and convolutions, forward and backward; sums are not rounded."""

    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounded = rounded

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        factors = _FACTORS.get(func, ())
        given = [self._rounded(one) if index in factors else one for index, one in enumerate(args)]
        results = func(*given, **(kwargs or {}))
        if func is torch.ops.aten.convolution_backward.default:
            *others, bias = results
            return *others, bias if bias is None else func(*args, **(kwargs or {}))[-1]  # a sum, no product
        return results


_FACTORS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.baddbmm.default: (1, 2),
    torch.ops.aten.convolution.default: (0, 1),
    torch.ops.aten.convolution_backward.default: (0, 1, 2),
}
