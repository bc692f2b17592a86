"""Several optimizers with different parameters make one step, together or in turns; anything else is another step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plumbline.evidence.trace import Step
from plumbline.worker.recorder.passes import OptimizerPart, joined
from plumbline.worker.recorder.recorder import Recorder

BATCH = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), "index": torch.arange(6)}
OTHER = {**BATCH, "index": torch.arange(6, 12)}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, batch):
        return self.head(self.trunk(batch["x"]).tanh())


@pytest.fixture
def training():
    """A recorder, and what a loop needs; only this test's own optimizers are hooked."""
    recorder, model = Recorder(), Two()
    recorder.watch(model)
    optimizers = [torch.optim.SGD(model.trunk.parameters(), lr=0.1), torch.optim.Adam(model.head.parameters(), lr=0.01)]
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(recorder.optimizer_steps.before)
        optimizer.register_step_post_hook(recorder.optimizer_steps.after)

    def backward(batch=BATCH):
        loss = model(batch).square().mean()
        recorder.on_loss(batch)
        loss.backward()

    return recorder, model, optimizers, backward


def test_one_optimizer_that_is_given_one_group_after_the_other_makes_one_step(training):
    recorder, model, _, backward = training
    groups = [{"params": list(model.trunk.parameters())}, {"params": list(model.head.parameters()), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.register_step_pre_hook(recorder.optimizer_steps.before)
    optimizer.register_step_post_hook(recorder.optimizer_steps.after)
    every = optimizer.param_groups
    for _ in range(2):
        backward()
        for group in every:
            optimizer.param_groups = [group]
            optimizer.step()
        model.zero_grad()
    assert len(recorder.steps) == 2
    for step in recorder.steps:
        assert tuple(step.gradients) == TRUNK + HEAD
        assert (step.learning_rates, step.turns, len(step.micro_batches)) == ((0.1, 0.5), (), 1)


TRUNK, HEAD = ("trunk.weight", "trunk.bias"), ("head.weight", "head.bias")


@pytest.mark.parametrize("order", [1, -1])
def test_one_backward_and_two_steps_are_one_step_in_the_models_order(training, order):
    recorder, model, optimizers, backward = training
    for _ in range(2):
        backward()
        for optimizer in optimizers[::order]:
            optimizer.step()
        model.zero_grad()
    assert len(recorder.steps) == 2
    for step in recorder.steps:
        assert tuple(step.gradients) == TRUNK + HEAD
        assert step.learning_rates == (0.1, 0.01)
        assert len(step.micro_batches) == 1
        assert step.turns == ()
        assert not any(step.before[name].equal(step.after[name]) for name in step.before)
    assert recorder.steps[1].before is recorder.steps[0].after


def test_turns_with_passes_of_their_own_are_one_step_that_says_so(training):
    recorder, model, optimizers, backward = training
    for _ in range(2):
        for optimizer in optimizers:
            model.zero_grad()
            backward()
            optimizer.step()
    assert [step.turns for step in recorder.steps] == [(TRUNK, HEAD)] * 2
    first = recorder.steps[0]
    assert first.micro_batches[0].samples == tuple(range(6))
    assert len(first.micro_batches) == 1, "the samples count once"
    model.load_state_dict({**first.before, **{name: first.after[name] for name in TRUNK}})
    model.zero_grad()
    backward()
    assert model.head.weight.grad.equal(first.gradients["head.weight"]), "at the weights that the first turn left"


def test_passes_for_each_optimizer_before_any_steps_count_once(training):
    recorder, _, optimizers, backward = training
    for _ in optimizers:
        backward()
    for optimizer in optimizers:
        optimizer.step()
    (step,) = recorder.steps
    assert [micro.samples for micro in step.micro_batches] == [tuple(range(6))]
    assert step.turns == ()


def test_turns_over_other_samples_are_steps_of_their_own(training):
    recorder, model, (first, second), backward = training
    for batch, optimizer in ((BATCH, first), (OTHER, second)):
        model.zero_grad()
        backward(batch)
        optimizer.step()
    assert [tuple(step.gradients) for step in recorder.steps] == [TRUNK, HEAD]


def test_a_parameter_in_two_optimizers_is_stepped_twice(training):
    recorder, model, (first, second), backward = training
    second.add_param_group({"params": list(model.trunk.parameters())})
    backward()
    first.step()
    second.step()
    assert [len(step.micro_batches) for step in recorder.steps] == [1, 0]


def test_one_optimizer_that_steps_twice_makes_two_steps(training):
    recorder, _, (first, _), backward = training
    backward()
    first.step()
    first.step()
    assert len(recorder.steps) == 2


@pytest.mark.parametrize("skipped", [(False, True), (True, False), (True, True), (False, False)])
def test_an_optimizer_that_was_skipped_alone_is_held_back_from_a_step_that_was_taken(skipped):
    weights = {"a": torch.zeros(1), "b": torch.zeros(1)}
    parts = [
        OptimizerPart(number, (name,), Step((), weights, {name: torch.ones(1)}, weights, (0.1,), one))
        for number, (name, one) in enumerate(zip("ab", skipped, strict=True))
    ]
    step = joined(parts)
    held = {name for name, one in zip("ab", skipped, strict=True) if one and not all(skipped)}
    assert step.skipped is all(skipped)
    assert (set(step.held_back), set(step.gradients)) == (held, {"a", "b"} - held)
