"""Writes a drawn problem to a file, which processes load like any workload of the user's own."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from pathlib import Path

from plumbline.core.cell import Cell
from plumbline.workloads.generated import Recipe

_FILE = '''"""A problem that `plumbline hunt` drew{found}. Train it: pytest suites/ --workload {name}.py"""

from plumbline.workloads.generated import Generated, Recipe


class Problem(Generated):
    name = "{name}"
    recipe = {recipe}
'''


def name_of(recipe: Recipe) -> str:
    """Return the name of a recipe's workload, which follows from the recipe."""
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
    """Return the cell with the recipe's workload."""
    return replace(cell, workload=name_of(recipe), workload_locator=locator)
