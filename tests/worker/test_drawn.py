"""Layers' draws are recorded with their samples, and a backward that draws again is detected."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from plumbline.judge.oracle.oracle import Oracle
from plumbline.worker.recorder.recorder import Recorder
from plumbline.workloads import WORKLOADS

WORKLOAD = WORKLOADS["random-masks"]
SAMPLES = (3, 8, 5, 20)
LAYERS = ["coins 1", "coins 2"]


@pytest.fixture
def recorded():
    """Return a recorder, and a function that trains one recorded step of the workload."""
    recorder, model = Recorder(), WORKLOAD.model()
    recorder.watch(model)
    optimizer = WORKLOAD.optimizer(model.parameters())
    optimizer.register_step_pre_hook(recorder.optimizer_steps.before)
    optimizer.register_step_post_hook(recorder.optimizer_steps.after)

    def train(forward=lambda model, batch: model(batch), loss=recorder.on_loss):
        batch = WORKLOAD.dataset(1).batch(SAMPLES)
        outputs = forward(model, batch)
        loss(batch)
        WORKLOAD.loss(outputs, batch).backward()
        optimizer.step()
        return recorder.steps[-1]

    return train, model


def test_the_oracle_computes_the_same_gradient_with_the_masks_handed_back(recorded):
    step = recorded[0]()
    (micro,) = step.micro_batches
    assert sorted(micro.drawn) == LAYERS
    assert all(set(drawn.unique().tolist()) == {0.0, 2.0} for drawn in micro.drawn.values())
    oracle = Oracle(WORKLOAD, 1)
    oracle.load(step.before)
    oracle.set_forward_state([step])
    for order in (SAMPLES, SAMPLES[::-1]):
        for name, value in oracle.gradient((((order,),),)).items():
            torch.testing.assert_close(step.gradients[name].double(), value, rtol=1e-4, atol=1e-6)


def test_another_loss_than_the_jobs_loses_no_masks(recorded):
    (micro,) = recorded[0](loss=lambda batch: None).micro_batches
    assert micro.samples == SAMPLES
    assert sorted(micro.drawn) == LAYERS


@pytest.mark.parametrize("kept", [True, False])
def test_a_backward_that_draws_anew_is_noticed(recorded, kept):
    def twice(model, batch):
        return checkpoint(model, batch, use_reentrant=False, preserve_rng_state=kept)

    (micro,) = recorded[0](twice).micro_batches
    assert sorted(micro.drawn) == (LAYERS if kept else sorted([*LAYERS, "coins 1 again", "coins 2 again"]))


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_once_more_have_drawn_once(recorded, reentrant):
    train, model = recorded
    forward = model.drop_middle.forward
    model.drop_middle.forward = lambda x, batch: checkpoint(forward, x, batch, use_reentrant=reentrant)
    (micro,) = train().micro_batches
    assert sorted(micro.drawn) == LAYERS


def test_an_evaluation_draws_nothing(recorded):
    train, _ = recorded

    def evaluated(model, batch):
        outputs = model(batch)
        with torch.no_grad():
            model.eval()(batch)
            model.train()
        return outputs

    (micro,) = train(evaluated).micro_batches
    assert all(set(drawn.unique().tolist()) == {0.0, 2.0} for drawn in micro.drawn.values())
