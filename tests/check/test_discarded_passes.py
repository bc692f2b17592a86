"""Backward passes before the first step, such as warm-ups, count only if their gradients are used."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from plumbline.check.verdict.verdict import Answer, answer_of


def train(*, trials=1, discards=True, micro_batches=1, zeroes_each=False):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    torch.manual_seed(1 + torch.distributed.get_rank())

    def accumulate():
        rows, labels = torch.randn(8, 6), torch.randint(3, (8,))
        (functional.cross_entropy(model(rows), labels) / micro_batches).backward()

    for _ in range(trials):
        accumulate()
    if discards:
        optimizer.zero_grad()
    for _ in range(4):
        for _ in range(micro_batches):
            if zeroes_each:
                optimizer.zero_grad()
            accumulate()
        optimizer.step()
        optimizer.zero_grad()


def cause(plumbline, **settings):
    (one,) = plumbline.check(lambda: train(**settings), ranks=2, steps=4).trainings
    if answer_of(one) is Answer.RIGHT:
        return "right"
    return next(finding.cause for finding in one.findings if finding.outcome.is_bad)


@pytest.mark.parametrize("trials", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_discarded_trials_are_no_mistake(plumbline, trials, micro_batches):
    assert cause(plumbline, trials=trials, micro_batches=micro_batches) == "right"


def test_gradients_of_trials_that_are_used_are_no_mistake_of_the_step(plumbline):
    assert cause(plumbline, discards=False) == "right"


@pytest.mark.parametrize("trials", [0, 1])
def test_gradients_zeroed_before_each_micro_batch_are_named(plumbline, trials):
    assert cause(plumbline, trials=trials, micro_batches=3, zeroes_each=True) == "only-last-micro-batch"
