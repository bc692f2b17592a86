"""A workload says into how many blocks its model can be cut: as many as the reference trainer finds."""

from __future__ import annotations

import pytest
import torch

from harness.trainer.balanced.chain import find_chain
from harness.workloads import WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
def test_its_blocks_are_those_that_are_found(name):
    workload = WORKLOADS[name]
    model, batch = workload.model(), workload.dataset(2).batch(range(4))
    chain = find_chain(model, lambda: workload.loss(model(batch), batch), 1, torch.device("cpu"), leaves(model))
    assert workload.blocks is not None
    assert workload.blocks <= len(chain.blocks)


def leaves(model):
    """Return the modules that have no others inside."""
    return [part for part in model.modules() if not list(part.children())]
