"""The functions of torch.nn.functional that compute a loss, and over how many terms each averages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

CLASSES = ("cross_entropy", "nll_loss")
"""Losses over targets that are classes, of which one may be ignored."""

ELEMENTS = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "soft_margin_loss", "poisson_nll_loss",
)  # fmt: skip
"""Losses with a term for each entry of the input and the target, broadcast to one shape."""

OTHERS = (
    "cosine_embedding_loss", "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "triplet_margin_loss",
)  # fmt: skip
"""Losses whose terms are counted by calling them without a reduction."""

FOLLOWED = (*CLASSES, *ELEMENTS, *OTHERS)


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function with its ``targets``. ``terms`` counts what it averages or adds.

    Ignored targets do not count, and a target counts by the weight of its class. ``counted`` is the mask of the terms
    in an unreduced loss, None where all of them count.
    """

    function: str
    reduction: str
    terms: float
    targets: Tensor
    counted: Tensor | None = None


def describe(function: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCall:
    """Return from the arguments of a loss function what the call averages over.

    Raises:
        TypeError: the arguments are not those of the function.
    """
    given = _signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    values = given.arguments
    reduction = _reduction(values)
    target = next(values[name] for name in ("target", "targets", "positive") if name in values).detach()
    if function in CLASSES:
        return _classes(function, reduction, values["input"], target, values.get("weight"), values["ignore_index"])
    if function in OTHERS:
        return LossCall(function, reduction, _unreduced(original, values).numel(), target)
    shape = torch.broadcast_shapes(values["input"].shape, target.shape)  # type: ignore[no-untyped-call]
    rows = shape[0] if shape else 1
    return LossCall(function, reduction, rows if reduction == "batchmean" else torch.Size(shape).numel(), target)


@torch.no_grad()
def _unreduced(original: Callable[..., Any], values: dict[str, Any]) -> Tensor:
    plain = {name: value for name, value in values.items() if name not in ("size_average", "reduce", "reduction")}
    result: Tensor = original(**plain, reduction="none")
    return result


def _classes(
    function: str, reduction: str, scores: Tensor, target: Tensor, weight: Tensor | None, ignored: int
) -> LossCall:
    if target.is_floating_point():  # probabilities of classes: (N, C, …), or (C)
        classes = scores.shape[min(1, scores.dim() - 1)]
        return LossCall(function, reduction, scores.numel() / max(classes, 1), target)
    counted = target != ignored
    terms = float(counted.sum() if weight is None or reduction == "none" else weight[target[counted]].sum())
    return LossCall(function, reduction, terms, target, counted)


def _reduction(values: dict[str, Any]) -> str:
    """Return the reduction, which two deprecated arguments may give as well."""
    if values.get("size_average") is None and values.get("reduce") is None:
        return str(values["reduction"])
    if values.get("reduce") is False:
        return "none"
    return "sum" if values.get("size_average") is False else "mean"


@lru_cache(maxsize=32)
def _signature(original: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(original)
