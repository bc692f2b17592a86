"""Computes matrix products in parts, as an optimizer that multiplies sharded matrices does.

Muon multiplies in bfloat16. A sum over shards rounds each part's sum, so right results differ by more than the order of
one sum explains. Optimizers without matrix products are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class PartialSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes each product of two matrices as a sum of ``parts`` products, each rounded to the matrices' dtype."""

    def __init__(self, parts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parts = parts

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the operator's result; a matrix product is computed in parts."""
        settings = dict(kwargs or {})
        if func is aten.mm.default:
            return self._summed(args[0], args[1], torch.mm)
        if func is aten.bmm.default:
            return self._summed(args[0], args[1], torch.bmm)
        if func is aten.addmm.default:
            return settings.get("beta", 1) * args[0] + settings.get("alpha", 1) * self._summed(
                args[1], args[2], torch.mm
            )
        return func(*args, **settings)

    def _summed(self, left: Tensor, right: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        pairs = zip(left.tensor_split(self._parts, -1), right.tensor_split(self._parts, -2), strict=True)
        total, *others = [product(a, b) for a, b in pairs if a.shape[-1]] or [product(left, right)]
        for other in others:
            total = total + other
        return total
