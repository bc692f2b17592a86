"""How far rounding alone moves the weights of a small problem on one device: what a program may not take for more."""

from __future__ import annotations

import io
import math
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plumbline.hunt.program.plain_torch import PlainTorch
from plumbline.hunt.program.source import one_device
from plumbline.workloads.generated import Recipe

DRAWS = 4
"""Models and data of which the largest difference counts: how much rounding grows in a training depends on them."""

TIMES = 10
"""A program's difference is more than rounding where it is so many times what another precision makes."""


def tolerance(problem: PlainTorch) -> float:
    """Return the largest difference of a weight after training that is still explained by rounding.

    What is measured is the training by hand, with other models and data: in float64, and in the cell's precision. For a
    cell of float64 it is that of float32, times the roundings of both.

    Raises:
        NotExpressedError: there is no such program.
    """
    precision = problem.cell.arithmetic
    own, single = (torch.finfo(dtype).eps for dtype in (getattr(torch, precision.storage), torch.float32))
    moved = 0.0
    for draw in range(DRAWS):
        recipe = replace(problem.recipe, seed=problem.recipe.seed + draw, shuffle=False)
        exact = _trained(problem, recipe, "64")
        rounded = _trained(problem, recipe, "32", precision.autocast)
        largest = max(float(one.abs().max()) for one in exact)
        differences = [float((one - other).abs().max()) for one, other in zip(exact, rounded, strict=True)]
        moved = max(moved, 10 * own * largest, *(one * own / single for one in differences))
        if not math.isfinite(sum(differences)):
            return math.inf
    return TIMES * moved


def _trained(problem: PlainTorch, recipe: Recipe, precision: str, autocast: str | None = None) -> list[Tensor]:
    """Return the weights in float64 that the training by hand ends with."""
    cell = replace(problem.cell, precision=precision)
    text = one_device(replace(problem, recipe=recipe, cell=cell), "The training by hand.")
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]), redirect_stdout(io.StringIO()), _cast(autocast):
        exec(compile(text, "by hand", "exec"), names)
    return [parameter.detach().double() for parameter in names["right"].parameters()]


def _cast(dtype: str | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast("cpu", getattr(torch, dtype))
