"""Reads from the graph of a loss, however it is written, whether it is a mean over its batch, and its weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MOST_NODES = 256

SAME_VALUES = (
    "AliasBackward0", "CloneBackward0", "ExpandBackward0", "ReshapeAliasBackward0", "SelectBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "ToCopyBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0",
    "ViewBackward0",
)  # fmt: skip
"""Nodes that hand on the single number of a loss."""

SAME_OUTPUTS = ("CallOutputsBackward", "_DDPSinkBackward")
"""Nodes that hand on each input as the output in the same place."""

_LINEAR = (
    "AbsBackward", "GatherBackward", "IndexBackward", "MeanBackward", "NegBackward", "SelectBackward", "SliceBackward",
    "SqueezeBackward", "ToCopyBackward", "UnsqueezeBackward", "ViewBackward",
)  # fmt: skip
"""Nodes whose output is multiplied by a positive number if their input is."""

REDUCES = ("MeanBackward", "SumBackward")

_MEAN = 1
"""How torch numbers the reduction ``mean`` of its loss functions."""


class UnknownWeightError(Exception):
    """The differentiated loss is no sum of means."""


def mean_weights(root: Any) -> list[list[float]] | None:
    """Return the weights of the means over a batch that add up to the differentiated loss; None if it is no such sum.

    A sum divided by a number counts as a mean over what the number may count: the sum's entries, its rows, or the
    entries that a mask keeps.

    Args:
        root: the node of the loss in the graph.
    """
    try:
        return list(_means(root, 0, 1.0, [MOST_NODES]))
    except (UnknownWeightError, AttributeError, RuntimeError):  # of a node that another version of torch has
        return None


def _means(node: Any, output: int, factor: float, left: list[int]) -> Iterator[list[float]]:
    left[0] -= 1
    if node is None or left[0] < 0:
        raise UnknownWeightError
    name = type(node).__name__
    following = node.next_functions
    if is_same_value(node, name):
        (inner, place), *_ = following
        yield from _means(inner, place, factor, left)
    elif name in SAME_OUTPUTS:
        inner, place = following[output]
        yield from _means(inner, place, factor, left)
    elif name in ("AddBackward0", "SubBackward0"):
        second = float(node._saved_alpha) * (-1 if name == "SubBackward0" else 1)
        for (inner, place), sign in zip(following, (1.0, second), strict=True):
            if inner is not None:
                yield from _means(inner, place, factor * sign, left)
    elif (constant := constant_of(node, name)) is not None:
        inner, place = next(one for one in following if one[0] is not None)
        yield from _means(inner, place, factor * constant, left)
    else:
        yield _counted(node, name, abs(factor))


def is_same_value(node: Any, name: str) -> bool:
    """Return whether a node hands on a single number, as a mean or a sum of one number without dimensions does."""
    return name in SAME_VALUES or (name.startswith(REDUCES) and not node._saved_self_sym_sizes)


def constant_of(node: Any, name: str) -> float | None:
    """Return the number by which a node multiplies, None where it does something else."""
    if name == "NegBackward0":
        return -1.0
    if name not in ("DivBackward0", "MulBackward0"):
        return None
    (left, _), (right, _) = node.next_functions
    if (right is not None) == (left is not None) or (name == "DivBackward0" and left is None):
        raise UnknownWeightError
    other = node._saved_other if right is None else node._saved_self
    if not isinstance(other, Tensor) or other.numel() != 1:
        raise UnknownWeightError
    return 1.0 / float(other) if name == "DivBackward0" else float(other)


def _counted(node: Any, name: str, factor: float) -> list[float]:
    """Return the weights that a mean or a sum may have; ``factor`` is what it is multiplied by."""
    if getattr(node, "_saved_reduction", None) == _MEAN:
        return [factor]
    if name.startswith("MeanBackward"):
        return [factor * inner_constant(_input_of(node))]
    if name != "SumBackward0":
        raise UnknownWeightError
    factor *= inner_constant(_input_of(node))
    sizes = node._saved_self_sym_sizes
    counts = {float(torch.Size(sizes).numel()), float(sizes[0]), *_kept(node.next_functions[0][0])}
    if counts == {1.0}:
        raise UnknownWeightError  # a sum of one entry looks like a mean
    return sorted(factor * count for count in counts)


def inner_constant(node: Any) -> float:
    """Return the number by which a node multiplies every entry, together with the nodes before it, as far as known."""
    constant = power = 1.0
    for _ in range(MOST_NODES):
        name = type(node).__name__
        if name in ("StackBackward0", "CatBackward0"):
            raise UnknownWeightError
        if name == "PowBackward0":
            power *= float(node._saved_exponent)
        elif name in ("DivBackward0", "MulBackward0"):
            (left, _), (right, _) = node.next_functions
            if name == "MulBackward0" and left is right:
                power *= 2
            elif left is not None and right is not None:
                return constant
            elif mask_of(node) is None and not (power != 1 and _differs_by_entry(node)):
                constant *= abs(constant_of(node, name) or 0.0) ** power
        elif not name.startswith(_LINEAR):
            return constant
        node = _input_of(node)
    return constant


def _input_of(node: Any) -> Any:
    return next((one for one, _ in node.next_functions if one is not None), None)


def _differs_by_entry(node: Any) -> bool:
    """Whether a node multiplies each entry by a number of its own, such as the scale of its feature."""
    return any(isinstance(one, Tensor) and one.numel() > 1 for one in (node._saved_self, node._saved_other))


def _kept(node: Any) -> Iterator[float]:
    """Yield how many entries a mask keeps."""
    if (mask := mask_of(node)) is not None:
        yield float(mask.sum())


def mask_of(node: Any) -> Tensor | None:
    """Return the mask of zeros and ones by which a node multiplies, None where it does something else."""
    if type(node).__name__ != "MulBackward0":
        return None
    for one in (node._saved_self, node._saved_other):
        if isinstance(one, Tensor) and not one.requires_grad and one.numel() > 1:
            return one if bool(((one == 0) | (one == 1)).all()) else None
    return None
