"""Grouped matrix products, for example of experts, in precisions for which torch has no kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def grouped_mm(
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Return what ``aten::_grouped_mm`` does, one product at a time, in the dtype of the matrices.

    Args:
        one: (rows, inner) or (groups, rows, inner).
        other: (inner, columns) or (groups, inner, columns).
        offs: (groups), where each group ends. If one matrix has no group dimension, groups divide its rows (``one``) or
            columns (``other``). If neither has one, groups divide the inner dimension, and the result is (groups, rows,
            columns).
        bias: added to the products.
        out_dtype: not used.
    """
    if offs is None:
        made = one @ other
        return made if bias is None else made + bias
    ends = offs.tolist()
    groups = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if one.dim() == other.dim():
        made = torch.stack([one[:, group] @ other[group] for group in groups])
    elif one.dim() == 2:
        made = one.new_zeros(len(one), other.shape[2])
        for matrix, group in zip(other, groups, strict=True):
            made[group] = one[group] @ matrix
    else:
        made = other.new_zeros(one.shape[1], other.shape[1])
        for matrix, group in zip(one, groups, strict=True):
            made[:, group] = matrix @ other[:, group]
    return made if bias is None else made + bias
