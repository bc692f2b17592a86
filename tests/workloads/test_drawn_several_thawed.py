"""Drawn masks, optimizers that share a model, and a layer that thaws: each as its file says."""

from __future__ import annotations

import pytest
import torch

from plumbline.judge.oracle.oracle import Oracle
from plumbline.worker.assignment import Assignment
from plumbline.worker.job import Job
from plumbline.worker.recorder.recorder import Recorder
from plumbline.workloads import WORKLOADS


def batch_of(workload, count=12):
    return workload.dataset(1).batch(range(count))


def test_masks_come_from_the_global_generator_and_are_fair():
    model, batch = WORKLOADS["random-masks"].model(), batch_of(WORKLOADS["random-masks"], 72)
    torch.manual_seed(0)
    first, second = model(batch), model(batch)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, model(batch))
    coins = model.drop_first.coins(torch.ones(1000, 64), {})
    assert abs(float(coins.mean()) - 1) < 5 / coins.numel() ** 0.5


def test_masks_are_those_of_the_batch_where_it_has_some():
    workload = WORKLOADS["random-masks"]
    model, batch = workload.model(), batch_of(workload)
    coins = {layer: 2.0 * (torch.rand(12, 64) < 0.5) for layer in ("coins 1", "coins 2")}
    assert torch.equal(model({**batch, **coins}), model({**batch, **coins}))
    assert not torch.equal(model({**batch, **coins}), model(batch))


def test_an_evaluation_drops_nothing_and_moves_no_generator():
    workload = WORKLOADS["random-masks"]
    model, before = workload.model().eval(), torch.get_rng_state()
    assert torch.equal(model(batch_of(workload)), model(batch_of(workload)))
    assert torch.equal(before, torch.get_rng_state())


def test_one_seed_gives_one_mask_in_every_precision():
    layer = WORKLOADS["random-masks"].model().drop_first.coins
    masks = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        masks.append(layer(torch.ones(5, 64, dtype=dtype), {}))
    assert masks[0].equal(masks[1].double())
    assert masks[0].equal(masks[2].double())


def test_optimizers_divide_the_parameters_among_themselves(cell_of):
    job = Job(Assignment(1, cell_of("several-optimizers", "none", "1x1"), 0, "gloo", ("cpu",), {}, "", ""), Recorder())
    model = job.model()
    optimizers = job.optimizers(model.parameters())
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert held == [id(parameter) for parameter in model.parameters()]
    assert len({type(optimizer) for optimizer in optimizers}) == len(optimizers) == 2
    with pytest.raises(RuntimeError, match=r"job\.optimizers"):
        job.optimizer(model.parameters())


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_late_layer_has_its_first_gradient_in_the_second_epoch(micro_batches):
    workload = WORKLOADS["thawed"]
    model, batch = workload.model(), batch_of(workload)
    optimizer, had = workload.optimizer(model.parameters()), []
    for _ in range(2 * workload.steps_per_epoch):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            workload.loss(model(batch), batch).backward()
        assert model.first.weight.grad.norm() > 0, "gradients flow through it all the time"
        had.append(model.late.weight.grad is not None)
        optimizer.step()
    assert had == [False] * workload.steps_per_epoch + [True] * workload.steps_per_epoch


def test_an_evaluation_does_not_count():
    workload = WORKLOADS["thawed"]
    model = workload.model().eval()
    for _ in range(9):
        model(batch_of(workload))
    assert model.seen == 0


@pytest.mark.parametrize("seen", [0, 2, 3, 5])
def test_the_oracle_begins_where_the_step_began(seen):
    workload = WORKLOADS["thawed"]
    oracle = Oracle(workload, 2)
    oracle._buffers = {"seen": torch.tensor(seen), "latest": torch.zeros(32)}
    layout = (((tuple(range(12)),), (tuple(range(12, 24)),)),)
    for _ in range(4):  # at every call
        assert ("late.weight" in oracle.gradient(layout)) == (seen >= workload.steps_per_epoch)
