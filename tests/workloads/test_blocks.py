"""A workload says into how many blocks its model can be cut: as many as the reference trainer finds."""

from __future__ import annotations

import pytest
import torch

from harness.trainer.balanced.chain import find_chain
from harness.workloads import WORKLOADS
from harness.workloads.generated import LAYERS, Generated, Recipe


@pytest.mark.parametrize("name", WORKLOADS)
def test_its_blocks_are_those_that_are_found(name):
    workload = WORKLOADS[name]
    model, batch = workload.model(), workload.dataset(2).batch(range(4))
    chain = find_chain(model, lambda: workload.loss(model(batch), batch), 1, torch.device("cpu"), leaves(model))
    assert workload.blocks is not None
    assert workload.blocks <= len(chain.blocks)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("inputs", ["tokens", "images"])
def test_those_of_a_recipe_are_those_that_are_found(inputs, layer):
    problem = type("Problem", (Generated,), {"name": "drawn", "recipe": Recipe(inputs, ("tanh", layer, "linear"))})()
    model, batch = problem.model(), problem.dataset(2).batch(range(4))
    chain = find_chain(model, lambda: problem.loss(model(batch), batch), 2, torch.device("cpu"))
    found = len(chain.blocks)
    assert problem.blocks in ((found, found - 1) if layer == "experts" else (found,)), "a router may be one by itself"


def leaves(model):
    """Return the modules that have no others inside."""
    return [part for part in model.modules() if not list(part.children())]
