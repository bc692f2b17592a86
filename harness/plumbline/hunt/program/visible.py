"""What a program trains otherwise than the problem that was found, because its final weights would not show it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from plumbline.hunt.program.kinds import COMPARES_WEIGHTS
from plumbline.hunt.program.plain_torch import PlainTorch

SLIGHT = ("slightly-scaled", "scaled-before-clipping")
"""Causes whose effect is next to that of rounding in float32."""

ORDERS = 3
"""Seeds that are tried where samples are shuffled: a wrong order of a few may be the right one by chance."""


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


def orders(problem: PlainTorch) -> Iterator[PlainTorch]:
    """Yield a problem, and where it is shuffled the same with other orders."""
    yield problem
    for more in range(1, ORDERS if problem.recipe.shuffle else 1):
        seed = problem.recipe.seed + more
        changed = (*problem.changed, f"has seed {seed}, as the order of another is right by chance")
        yield replace(problem, recipe=replace(problem.recipe, seed=seed), changed=changed)
