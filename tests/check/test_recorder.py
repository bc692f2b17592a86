"""Which optimizer steps the recorder takes down, and with which backward passes."""

import pytest
import torch
from torch import nn

from harness.check.judge.coverage import NO_STEP


class Raising(torch.optim.SGD):
    """Raises in its second step, before any weight has changed."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2:
            raise MemoryError
        return super().step(closure)


def model_and_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, lambda: nn.functional.cross_entropy(model(torch.randn(5, 6)), torch.randint(3, (5,)))


def steps_of(checked):
    (training,) = checked.trainings
    return training.training.ranks[0].steps


@pytest.mark.parametrize("again", [True, False], ids=["taken again", "left out"])
def test_steps_after_one_that_raised_are_recorded(plumbline, again):
    def train():
        model, loss = model_and_loss()
        optimizer = Raising(model.parameters(), 0.1)
        for _ in range(6):
            loss().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            try:
                optimizer.step()
            except MemoryError:
                if again:
                    optimizer.step()
            optimizer.zero_grad()

    checked = plumbline.check(train, ranks=1, steps=4)
    checked.assert_right()
    assert [step.number for step in steps_of(checked)] == [0, 1, 2, 3]


def test_models_that_are_clipped_together_have_their_gradients_from_before(plumbline):
    def train():
        (first, loss), (second, other) = model_and_loss(), model_and_loss()
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
        for _ in range(2):
            (loss() + other()).backward()
            nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    checked = plumbline.check(train, ranks=1, steps=2)
    checked.assert_right()
    assert all(step.unclipped is not None for step in steps_of(checked))


def test_an_optimizer_whose_first_step_comes_too_late_is_not_covered(plumbline):
    def train():
        (critic, loss), (generator, other) = model_and_loss(), model_and_loss()
        often, seldom = (torch.optim.SGD(model.parameters(), 0.1) for model in (critic, generator))
        for number in range(1, 7):
            loss().backward()
            often.step()
            often.zero_grad()
            if number % 5 == 0:
                other().backward()
                seldom.step()
                seldom.zero_grad()

    checked = plumbline.check(train, ranks=1, steps=3)
    checked.assert_right()
    (training,) = checked.trainings
    (uncovered,) = training.coverage.uncovered
    assert uncovered.why == NO_STEP
    assert uncovered.entries == training.coverage.entries / 2
    assert training.coverage.share == 0.5
