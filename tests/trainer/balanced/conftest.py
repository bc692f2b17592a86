"""A plan for a module and a batch, without a trainer."""

from __future__ import annotations

import pytest
import torch

from plumbline.trainer.balanced.chain import find_chain
from plumbline.trainer.balanced.pipeline_batches import divisors
from plumbline.trainer.balanced.planning import best_plan, measure_chain
from plumbline.trainer.module import in_mode


@pytest.fixture
def plan():
    def planned(module, batch, devices, counts=None, memory=None, optimizers=()):
        cpu = torch.device("cpu")
        declare = getattr(module, "configure_blocks", lambda: None)
        with in_mode(module, training=True):
            chain = find_chain(module, lambda: module(batch), devices, cpu, declare())
        counts = divisors(len(batch)) if counts is None else counts
        profiles = measure_chain(module, chain, module, batch, counts, device=cpu, optimizers=optimizers)
        return best_plan(profiles, devices, memory)

    return planned
