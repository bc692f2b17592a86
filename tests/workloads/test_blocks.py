"""A workload declares how many blocks its model can be divided into, as the reference trainer finds them."""

from __future__ import annotations

import pytest
import torch

from plumbline.trainer.balanced.chain import find_chain
from plumbline.workloads import WORKLOADS
from plumbline.workloads.generated import LAYERS, Generated, Recipe


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


@pytest.mark.parametrize("name", ["unused-parameters", "unused-at-the-end"])
@torch.no_grad()
def test_batches_that_leave_a_layer_unused_pass_wherever_the_model_is_cut(name):
    workload = WORKLOADS[name]
    model, batches = workload.model(), list(batches_of(workload))
    expected = [workload.loss(model(batch), batch) for batch in batches]
    for first in batches[:2] + batches[-1:]:
        chain = find_chain(
            model, lambda first=first: workload.loss(model(first), first), 2, torch.device("cpu"), declared(model)
        )
        assert len(chain.blocks) >= workload.blocks
        for cut in range(1, len(chain.blocks)):
            interception = chain.interception(model, torch.device("cpu"))
            parts = chain.part(0, cut), chain.part(cut, len(chain.blocks))
            with interception.installed():
                for batch, whole in zip(batches, expected, strict=True):
                    values = []
                    for part in parts:
                        values = interception.run(part, values, lambda batch=batch: workload.loss(model(batch), batch))
                    assert torch.equal(values, whole)


def batches_of(workload):
    """Yield an epoch's micro-batches of four samples each."""
    samples = workload.dataset(2)
    for start in range(0, workload.samples(2), 4):
        yield samples.batch(range(start, start + 4))


def declared(model):
    """Return the blocks that a model declares, or None."""
    return model.configure_blocks() if hasattr(model, "configure_blocks") else None


def leaves(model):
    """Return the modules without children."""
    return [part for part in model.modules() if not list(part.children())]
