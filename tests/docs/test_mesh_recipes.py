"""Every mesh recipe trains, on real ranks, like one device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plumbline.core.backend import BACKENDS
from plumbline.core.outcome import Outcome, worst
from plumbline.core.topology import Topology
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "adapters-for-meshes.md").read_text()
RECIPES = dict(re.findall(r"```python\n# recipe: (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
LOOP = "mesh_loop"
TRAINED = [
    ("tensor_parallel", "tp", "1x2", "mlp"),
    ("sequence_parallel", "sp", "1x2", "lm-tokens"),
    ("megatron_layers", "tp", "1x2", "mlp"),
    ("experts", "ep", "1x2", "experts"),
    ("pipeline", "pp", "1x2", "mlp"),
    ("hybrid_shards", "hsdp", "1x4", "mlp"),
    ("zero", "zero2", "1x3", "mlp"),
]


@pytest.fixture(scope="module")
def recipes(warm_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh_recipes")
    for name, text in RECIPES.items():
        (folder / f"{name}.py").write_text(text)
    everybody = folder / "every_recipe.py"
    everybody.write_text("".join(f"from {name} import train as {name}\n" for name in RECIPES if name != LOOP))
    return warm_pool(everybody)


def test_every_block_of_code_is_a_recipe_that_is_trained():
    assert len(RECIPES) == PAGE.count("```python")
    assert {name for name, *_ in TRAINED} == RECIPES.keys() - {LOOP}


@pytest.mark.parametrize(("recipe", "backend", "topology", "workload"), TRAINED)
def test_it_is_right(recipe, backend, topology, workload, recipes, cell_of, tmp_path):
    cell = cell_of(workload, backend, topology, subject=recipe.replace("_", "-"))
    findings = examine(recipes, cell, tmp_path, Settings(600)).findings
    assert worst(finding.outcome for finding in findings) is Outcome.PASSED, findings


def test_the_table_has_the_dimensions_of_every_backend_with_a_process_per_device():
    rows = re.findall(r"^\| (`.*?) \| (`.*?) \|", PAGE, re.MULTILINE)
    told = {
        name: tuple(re.findall(r"`(\w+)`", sizes)) for names, sizes in rows for name in re.findall(r"`(.*?)`", names)
    }
    for name, dimensions in told.items():
        assert BACKENDS[name].mesh(Topology(2, 4)).names == dimensions
