"""A step whose closure computes gradients is recorded with those, not with earlier ones."""

from __future__ import annotations

import copy

import torch
from torch import nn

from plumbline.worker.recorder.recorder import Recorder


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch):
        return self.layer(batch["x"])


def test_gradients_are_those_that_the_closure_computed():
    recorder, model = Recorder(), Model()
    recorder.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(recorder.optimizer_steps.before)
    optimizer.register_step_post_hook(recorder.optimizer_steps.after)
    batch = {"x": torch.randn(6, 4), "index": torch.arange(6)}

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        recorder.on_loss(batch)
        loss.backward()
        return loss

    for call in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        loss = model.layer(batch["x"]).square().mean()
        expected = torch.autograd.grad(loss, model.layer.weight)[0]
        assert torch.equal(call(closure).detach(), loss.detach())
        step = recorder.steps[-1]
        assert torch.equal(step.gradients["layer.weight"], expected)
        assert step.micro_batches[0].forwards == (tuple(range(6)),)
    assert len(recorder.steps) == 2


def test_a_copy_of_the_model_keeps_one_recorder():
    recorder, model = Recorder(), Model()
    recorder.watch(model)
    average = copy.deepcopy(model)
    average({"x": torch.randn(2, 4), "index": torch.tensor([3, 4])})
    assert recorder._settle()[0].forwards == ((3, 4),)
