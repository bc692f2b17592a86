"""Every recipe of the documentation is a subject that trains, on real ranks, what one device trains."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from harness.core.outcome import Outcome, worst
from harness.engine.examine import examine
from harness.launch.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "your-own-trainer.md"
RECIPES = dict(re.findall(r"```python\n# recipe: (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL))


def library(recipe):
    """The package that a recipe is for, None where torch is enough."""
    named = re.search(r'library="(\w+)"', RECIPES[recipe])
    return named and named[1]


INSTALLED = [recipe for recipe in RECIPES if library(recipe) is None or importlib.util.find_spec(library(recipe))]


@pytest.fixture(scope="session")
def recipes(warm_pool, tmp_path_factory):
    """One pool for all recipes whose library is installed."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in INSTALLED:
        (folder / f"{name}.py").write_text(RECIPES[name])
    everybody = folder / "every_recipe.py"
    everybody.write_text("".join(f"from {name} import train as {name}\n" for name in INSTALLED))
    return warm_pool(everybody)


def test_there_is_one_for_each_kind_of_code():
    assert set(RECIPES) == {
        "trainer_class", "script_with_functions", "model_returns_its_loss", "accelerate_script", "lightning_module",
        "fabric_loop",
    }  # fmt: skip
    blocks = PAGE.read_text().count("```python")
    assert len(RECIPES) == blocks, "a block of code that no test runs"


# Dropout that follows from the sample, whose evidence is the sample ids; a loss that needs its own batch's tokens.
@pytest.mark.parametrize("workload", ["dropout", "lm-tokens"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_right(recipe, workload, recipes, cell_of, tmp_path):
    if recipe not in INSTALLED:
        pytest.skip(f"needs {library(recipe)}")
    cell = cell_of(workload, "ddp", "1x2", subject=recipe.replace("_", "-"))
    findings = examine(recipes, cell, tmp_path, Settings(60)).findings
    expected = Outcome.PASSED if workload == "dropout" else Outcome.DEVIATES
    if recipe == "model_returns_its_loss":
        expected = Outcome.PASSED  # where there are labels, transformers takes the mean over those of all ranks
    assert worst(finding.outcome for finding in findings) is expected, findings
    # Where the loss is inside of the model, it is still the job's, and its samples are known.
    assert next(finding for finding in findings if finding.check == "samples").outcome is Outcome.PASSED
