"""What a program trains otherwise than the problem that was found, because its final weights would not show it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from harness.hunt.kinds import COMPARES_WEIGHTS
from harness.hunt.plain_torch import PlainTorch

SLIGHT = ("slightly-scaled", "scaled-before-clipping")
"""Causes whose effect is next to that of rounding in float32."""


def visible(problem: PlainTorch, precisions: Collection[str]) -> PlainTorch:
    """Return a problem whose weights show what was found; ``precisions`` are those that the trainer has."""
    recipe, cell = problem.recipe, problem.cell
    changed = []
    if recipe.loss == "in-batch" and problem.batch == 1 and problem.kind in COMPARES_WEIGHTS:
        recipe = replace(recipe, batch_size=2 * cell.topology.devices)
        changed.append("has two samples a batch and rank, as the loss among one is zero")
    if problem.finding.cause in SLIGHT and cell.precision == "32" and "64" in precisions:
        cell = replace(cell, precision="64")
        changed.append("trains in float64, where rounding hides less")
    return replace(problem, recipe=recipe, cell=cell, changed=tuple(changed))
