"""What happens between two optimizer steps: weights that the script changes, and optimizers that it makes anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam

from plumbline.check.verdict.verdict import Answer, answer_of, sentence_on

STEPS = 4


def fit(make, between=lambda parameters, optimizer: None, made=1):
    """Train with an optimizer that is made before the first ``made`` steps. ``between`` runs after each step."""

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        optimizer = None
        for step in range(STEPS):
            if step < made:
                optimizer = make([*model.parameters()], optimizer)
            rows, labels = torch.randn(8, 6), torch.randint(4, (8,))

            def loss(rows=rows, labels=labels, optimizer=optimizer):
                optimizer.zero_grad()
                value = functional.cross_entropy(model(rows), labels)
                value.backward()
                return value

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
            with torch.no_grad():
                between(list(model.parameters()), optimizer)

    return train


def adam(parameters, _):
    return Adam(parameters, 1e-2)


def plain(parameters, _):
    return SGD(parameters, 0.1)


def momentum(parameters, _):
    return SGD(parameters, 0.1, momentum=0.9)


def lbfgs(parameters, _):
    return torch.optim.LBFGS(parameters, 0.1, max_iter=2)


def adam_with_the_last_state(parameters, last):
    optimizer = Adam(parameters, 1e-2)
    if last is not None:
        optimizer.load_state_dict(last.state_dict())
    return optimizer


def clamp(parameters, _):
    for one in parameters:
        one.clamp_(-0.2, 0.2)


def decay(parameters, _):
    for one in parameters:
        one.mul_(0.99)


class WrittenBack:
    """Averages the weights, and trains on from the average."""

    def __init__(self):
        self.averages = {}

    def __call__(self, parameters, _):
        for number, one in enumerate(parameters):
            one.copy_(self.averages.setdefault(number, one.clone()).lerp_(one, 0.1))


class Reset:
    """Takes each step from the first weights, as one that adapts to each sample by itself."""

    def __init__(self):
        self.first = {}

    def __call__(self, parameters, _):
        for number, one in enumerate(parameters):
            one.copy_(self.first.setdefault(number, one.clone()))


def swapped_and_back(parameters, _):
    for one in parameters:
        kept = one.clone()
        one.zero_()  # evaluated with other weights
        one.copy_(kept)


CHANGED = {"weights clamped": clamp, "decayed by hand": decay, "an average written back": WrittenBack()}


@pytest.mark.parametrize("between", CHANGED.values(), ids=CHANGED.keys())
def test_weights_that_change_between_steps_are_not_praised(plumbline, between):
    one = plumbline.check(fit(adam, between), ranks=1, steps=STEPS).trainings[0]
    assert answer_of(one) is Answer.RIGHT_IN_PART
    assert "100 % of gradients" in sentence_on(one)
    assert "between two optimizer steps" in one.coverage.updates.left_out[0].why


MADE_FOR_EACH_STEP = {"Adam": adam, "SGD with momentum": momentum}


@pytest.mark.parametrize("make", MADE_FOR_EACH_STEP.values(), ids=MADE_FOR_EACH_STEP.keys())
def test_an_optimizer_made_for_each_step_loses_its_state(plumbline, make):
    checked = plumbline.check(fit(make, made=STEPS), ranks=1, steps=STEPS)
    (wrong,) = (one for one in checked.trainings[0].findings if one.outcome.is_bad)
    assert wrong.cause == "optimizer-made-for-each-step"


ACCEPTED = {
    "weights put back": fit(adam, swapped_and_back),
    "without state": fit(plain, made=STEPS),
    "with the state of the last one": fit(adam_with_the_last_state, made=STEPS),
    "once again": fit(adam, made=2),
    "several evaluations": fit(lbfgs, made=STEPS),
    "from the first weights": fit(adam, Reset(), made=STEPS),
}


@pytest.mark.parametrize("train", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_may_be_meant_between_steps_is_not_wrong(plumbline, train):
    answer = answer_of(plumbline.check(train, ranks=1, steps=STEPS).trainings[0])
    assert answer in (Answer.RIGHT, Answer.RIGHT_IN_PART, Answer.NOT_JUDGED)
