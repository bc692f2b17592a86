"""Every recipe in the documentation trains, on real ranks, like one device; its other code runs."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import plumbline
from plumbline.core.outcome import Outcome, worst
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "write-an-adapter.md"
RECIPES = dict(re.findall(r"```python\n# recipe: (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL))


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


OF_README = "my_ddp"
RECIPES[OF_README], MARKED_TEST = blocks("README.md")
BY_ITERATIONS = "by_iterations"
(LOOP,) = blocks("docs/subject-interface.md")
RECIPES[BY_ITERATIONS] = f"""
import torch
from torch.nn.parallel import DistributedDataParallel
from plumbline import subject


@subject(name="by-iterations", backends=["ddp"], precisions=["32"], data="iterations", capabilities=["accumulation"])
def train(job):
    torch.distributed.init_process_group(job.comm)
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.parameters())
{textwrap.indent(LOOP, "    ")}"""


def library(recipe):
    """The package that a recipe is for, or None if torch suffices."""
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


def test_the_marked_test_of_the_readme_is_one_that_runs():
    assert MARKED_TEST in (ROOT / "docs" / "test-on-ranks.md").read_text()


def test_there_is_one_for_each_kind_of_code():
    assert set(RECIPES) == {
        "trainer_class", "script_with_functions", "model_returns_its_loss", "accelerate_script", "lightning_module",
        "fabric_loop", OF_README, BY_ITERATIONS,
    }  # fmt: skip
    assert len(RECIPES) == len(blocks("docs/write-an-adapter.md")) + 2, "a block of code that no test runs"


# Dropout that depends on the sample id; a loss that needs its own batch's tokens.
@pytest.mark.parametrize("workload", ["dropout", "lm-tokens"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_right(recipe, workload, recipes, cell_of, tmp_path):
    if recipe not in INSTALLED:
        pytest.skip(f"needs {library(recipe)}")
    cell = cell_of(workload, "ddp", "1x2", subject=recipe.replace("_", "-"))
    findings = examine(recipes, cell, tmp_path, Settings(600)).findings
    expected = Outcome.PASSED if workload == "dropout" else Outcome.DEVIATES
    if recipe == "model_returns_its_loss":
        expected = Outcome.PASSED  # if there are labels, transformers averages over those of all ranks
    assert worst(finding.outcome for finding in findings) is expected, findings
    # A loss inside the model is still the job's, so its samples are known.
    assert next(finding for finding in findings if finding.check == "samples").outcome is Outcome.PASSED


def test_the_reference_trainer_s_page_runs(monkeypatch, capfd):
    """The loop trains on two ranks; each line creates its trainer, and nothing of eight GPUs is started."""
    trainers, loop = blocks("docs/reference-trainer.md")
    fitted = []
    with monkeypatch.context() as patch:
        for name, value in (("NODE_RANK", "0"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")):
            patch.setenv(name, value)
        patch.setattr(plumbline.Trainer, "fit", lambda trainer, module: fitted.append(module))
        exec(trainers.replace("import Module, Trainer", "import Module, Trainer\nMyModule = Module"), {})
    assert len(fitted) == trainers.count(".fit(")

    batches = torch.utils.data.TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))
    loaders = ("train_loader", "val_loader", "test_loader")
    exec(loop, {name: torch.utils.data.DataLoader(batches, batch_size=2) for name in loaders})
    assert capfd.readouterr().out


def test_the_grid_on_the_page_about_clusters_is_submitted(monkeypatch, tmp_path):
    (grid,) = blocks("docs/clusters.md")
    submitted = []

    def submit(cluster, main, **options):
        submitted.append((main, options))

    monkeypatch.setattr(sys, "argv", ["grid.py"])
    monkeypatch.setattr(plumbline.SlurmCluster, "optimize_parallel_cluster_gpu", submit)
    values = {}
    exec(grid.replace("/shared/logs", str(tmp_path)), values)
    assert submitted == [(values["main"], {"nb_trials": None, "job_name": "grid"})]
    assert values["cluster"].hyperparam_optimizer.trials() == [{"learning_rate": 0.1}, {"learning_rate": 0.01}]
