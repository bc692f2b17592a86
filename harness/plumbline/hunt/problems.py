"""Draws problems, which are recipes that a subject can train on its cells, and writes them to files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from hypothesis import strategies as st

from plumbline.core.backend import declared_for
from plumbline.core.cell import Cell
from plumbline.planning.declaration import Declaration
from plumbline.workloads.generated import INPUTS, LABELS, LAYERS, LOSSES, OPTIMIZERS, RETURNS, SCHEDULES, TEXT, Recipe

MOST_LAYERS = 5
WIDTHS = (1, 3, 5, 8)
ASKS = {
    "several": "several-optimizers",
    "unused": "unused-parameters",
    "thawed": "unused-parameters",
    "frozen": "frozen-parameters",
    "sparse-tokens": "sparse-gradients",
    "nested": "nested-outputs",
}
"""The capabilities that words of a recipe need."""

OVER_SAMPLES = ("classes", "squares", "two")
"""Losses that are means over samples. The epoch's mean of others depends on how it is divided into batches."""


@dataclass(frozen=True)
class Drawn:
    """A recipe, and the cell that trains it. The cell's workload is a placeholder."""

    recipe: Recipe
    cell: Cell


@st.composite
def problems(draw: st.DrawFn, declared: Sequence[Declaration], cells: Sequence[Cell]) -> Drawn:
    """Draw one of ``cells`` and a recipe that needs nothing beyond what is declared for its backend."""
    cell = draw(st.sampled_from(list(cells)))
    subject = declared_for(cell.subject, cell.backend, declared)
    recipe = draw(recipes(subject.capabilities, own_loss=subject.behavior.own_loss))
    if "batchnorm" in recipe.layers:  # it raises where a device has one sample
        least = 2 * cell.topology.devices * cell.contract.micro_batches
        recipe = replace(recipe, batch_size=max(recipe.batch_size, least), left_out=0)
    if cell.contract.micro_batches > 1:
        # Also the last batch must divide into the micro-batches of a pipeline's replicas.
        pieces = len(cell.contract.replicas(cell.topology)) * cell.contract.micro_batches
        multiple = math.lcm(pieces, cell.topology.devices)
        batch_size = -(-recipe.batch_size // multiple) * multiple
        left_out = min(recipe.left_out // multiple * multiple, batch_size - multiple)
        recipe = replace(recipe, batch_size=batch_size, left_out=left_out)
    if recipe.accumulate > 1 and recipe.loss not in OVER_SAMPLES:
        # Micro-batches of different sizes may have equal weights, or weights by size. Either is right.
        recipe = replace(recipe, left_out=0)
    return Drawn(recipe, cell)


@st.composite
def recipes(draw: st.DrawFn, capabilities: frozenset[str], *, own_loss: bool = False) -> Recipe:
    """Draw a recipe, which shrinks to a linear layer with a mean loss and SGD, on one batch of one sample.

    A trainer with an ``own_loss`` gets only texts, whose next tokens are the labels.
    """
    inputs = TEXT if own_loss else draw(st.sampled_from(_allowed(INPUTS, capabilities)))
    sparse = inputs == "sparse-tokens"
    tokens = inputs in ("tokens", "sparse-tokens")
    losses = [LABELS] if own_loss else [one for one in LOSSES if tokens or one != "token-mean"]
    loss = draw(st.sampled_from(losses))
    optimizer = draw(st.sampled_from(["sgd"] if sparse else _allowed(OPTIMIZERS, capabilities)))
    recipe = Recipe(
        inputs=inputs,
        layers=tuple(draw(st.lists(_layers(capabilities, own_loss), max_size=MOST_LAYERS))),
        loss=loss,
        optimizer=optimizer,
        schedule=draw(st.sampled_from(SCHEDULES)) if "scheduler" in capabilities else "none",
        batch_size=draw(st.integers(1, 24)),
        steps_per_epoch=draw(st.integers(1, 4)),
        epochs=draw(st.integers(1, 2)),
        left_out=draw(st.integers(0, 12)),
        accumulate=draw(st.integers(1, 3)) if "accumulation" in capabilities else 1,
        clip_norm=draw(st.sampled_from([None, 0.05, 1.0, 100.0]))
        if "clipping" in capabilities and not sparse
        else None,
        validate_every=draw(st.sampled_from([None, 1, 2])) if "validation" in capabilities else None,
        metrics=draw(st.booleans()) if "metrics" in capabilities and loss in OVER_SAMPLES else False,
        returns=draw(st.sampled_from(_allowed(RETURNS, capabilities))),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )
    if (recipe.validate_every or 0) > recipe.steps_per_epoch:  # nothing would be due, and Lightning refuses it
        recipe = replace(recipe, validate_every=None)
    if "checkpoint" not in capabilities or recipe.steps == 1:
        return recipe
    return replace(recipe, interrupt_after=draw(st.sampled_from([None, *range(1, recipe.steps)])))


def _layers(capabilities: frozenset[str], own_loss: bool) -> st.SearchStrategy[str]:
    # With an own loss no statistics of batches: each rank has its own, and a loss over the labels of all ranks is then
    # neither what one device computes nor a mean over ranks.
    words = []
    for kind in _allowed((kind for kind in LAYERS if not (own_loss and kind == "batchnorm")), capabilities):
        words += [f"linear-{width}" for width in WIDTHS] if kind == "linear" else [kind]
    return st.sampled_from(words)


def _allowed(words: Iterable[str], capabilities: frozenset[str]) -> list[str]:
    return [word for word in words if ASKS.get(word, word) in {*capabilities, word}]


_FILE = '''"""A problem that `plumbline hunt` drew{found}. Train it: pytest suites/ --workload {name}.py"""

from plumbline.workloads.generated import Generated, Recipe


class Problem(Generated):
    name = "{name}"
    recipe = {recipe}
'''


def name_of(recipe: Recipe) -> str:
    return f"drawn-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:8]}"


def write_problem(recipe: Recipe, folder: Path, found: str = "") -> str:
    """Write the recipe's file, and return the locator of its workload. ``found`` ends its first sentence."""
    name = name_of(recipe)
    file = folder / f"{name}.py"
    file.write_text(_FILE.format(found=found, name=name, recipe=in_words(recipe)), "utf-8")
    return f"{file.resolve()}::{name}"


def in_words(recipe: Recipe) -> str:
    """Return the recipe in Python, without what equals the plainest one."""
    plain = Recipe()
    given = [
        f"{field.name}={getattr(recipe, field.name)!r}"
        for field in fields(recipe)
        if getattr(recipe, field.name) != getattr(plain, field.name)
    ]
    return f"Recipe({', '.join(given)})"


def trained_on(cell: Cell, recipe: Recipe, locator: str) -> Cell:
    return replace(cell, workload=name_of(recipe), workload_locator=locator)
