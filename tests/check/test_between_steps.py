"""Between optimizer steps: weights and states that the script changes, and optimizers that it creates again."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from plumbline.check.verdict.verdict import Answer, answer_of, notes_on, sentence_on

STEPS = 4


def fit(make, between=lambda parameters, optimizer: None, made=1):
    """Train with an optimizer that is created before the first ``made`` steps. ``between`` runs after each step."""

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
    """Averages the weights, and continues from the average."""

    def __init__(self):
        self.averages = {}

    def __call__(self, parameters, _):
        for number, one in enumerate(parameters):
            one.copy_(self.averages.setdefault(number, one.clone()).lerp_(one, 0.1))


class Reset:
    """Takes each step from the initial weights, like a trainer that adapts to each sample by itself."""

    def __init__(self):
        self.first = {}

    def __call__(self, parameters, _):
        for number, one in enumerate(parameters):
            one.copy_(self.first.setdefault(number, one.clone()))


def swapped_and_back(parameters, _):
    for one in parameters:
        kept = one.clone()
        one.zero_()  # evaluated with different weights
        one.copy_(kept)


CHANGED = {"weights clamped": clamp, "decayed by hand": decay, "an average written back": WrittenBack()}


@pytest.mark.parametrize("between", CHANGED.values(), ids=CHANGED.keys())
def test_weights_that_change_between_steps_are_not_praised(plumbline, between):
    one = plumbline.check(fit(adam, between), ranks=1, steps=STEPS).trainings[0]
    assert answer_of(one) is Answer.RIGHT_IN_PART
    assert "100 % of gradients" in sentence_on(one)
    assert "changes the weights between optimizer steps" in one.coverage.updates.left_out[0].why


def clear(_, optimizer):
    optimizer.state.clear()


def zero(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


class LoadedAgain:
    """Loads the first step's state before each later step."""

    def __init__(self):
        self.first = None

    def __call__(self, _, optimizer):
        if self.first is None:
            self.first = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(self.first))


STATES_CHANGED = {
    "cleared": fit(adam, clear),
    "set to zero": fit(adam, zero),
    "loaded again": fit(adam, LoadedAgain()),
    "in a second optimizer": fit(adam, made=2),
}


@pytest.mark.parametrize("train", STATES_CHANGED.values(), ids=STATES_CHANGED.keys())
def test_a_state_that_changes_between_steps_is_not_praised(plumbline, train):
    one = plumbline.check(train, ranks=1, steps=STEPS).trainings[0]
    assert answer_of(one) is Answer.RIGHT_IN_PART
    assert "changes the optimizer's state between steps" in one.coverage.updates.left_out[0].why
    assert [note for note in notes_on(one) if note.startswith("The optimizer's state of ")]


MADE_FOR_EACH_STEP = {"Adam": adam, "SGD with momentum": momentum}


@pytest.mark.parametrize("make", MADE_FOR_EACH_STEP.values(), ids=MADE_FOR_EACH_STEP.keys())
def test_an_optimizer_made_for_each_step_loses_its_state(plumbline, make):
    checked = plumbline.check(fit(make, made=STEPS), ranks=1, steps=STEPS)
    (wrong,) = (one for one in checked.trainings[0].findings if one.outcome.is_bad)
    assert wrong.cause == "optimizer-made-for-each-step"


ACCEPTED = {
    "without state": fit(plain, made=STEPS),
    "with the state of the last one": fit(adam_with_the_last_state, made=STEPS),
    "several evaluations": fit(lbfgs, made=STEPS),
    "from the first weights": fit(adam, Reset(), made=STEPS),
}


@pytest.mark.parametrize("train", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_may_be_meant_between_steps_is_not_wrong(plumbline, train):
    answer = answer_of(plumbline.check(train, ranks=1, steps=STEPS).trainings[0])
    assert answer in (Answer.RIGHT, Answer.RIGHT_IN_PART, Answer.NOT_JUDGED)


def masked(parameters, _):
    parameters[0].mul_(torch.arange(parameters[0].numel()).view_as(parameters[0]) % 2)


def within_a_limit(parameters, _):
    parameters[0].copy_(parameters[0].renorm(2, 0, 1e3))  # longer than any row


class Averaged:
    """Keeps an average of the weights."""

    def __init__(self):
        self.averages = {}

    def __call__(self, parameters, _):
        for number, one in enumerate(parameters):
            self.averages.setdefault(number, one.clone()).lerp_(one, 0.1)


def state_moved_and_back(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double().float()


LEFT_AS_THEY_WERE = {
    "weights put back": swapped_and_back,
    "a limit that none exceeds": within_a_limit,
    "an average beside": Averaged(),
    "a state in other memory": state_moved_and_back,
}


@pytest.mark.parametrize("between", LEFT_AS_THEY_WERE.values(), ids=LEFT_AS_THEY_WERE.keys())
def test_weights_and_states_that_are_as_the_step_left_them_are_right(plumbline, between):
    assert answer_of(plumbline.check(fit(adam, between), ranks=1, steps=STEPS).trainings[0]) is Answer.RIGHT


def test_a_mask_costs_the_share_of_what_it_masks_alone(plumbline):
    one = plumbline.check(fit(adam, masked), ranks=1, steps=STEPS).trainings[0]
    assert [each.names for each in one.coverage.updates.left_out] == [("0.weight",)]


# Weights that change between the backward pass and the step


def climb(back="copy", through_data=True, ranks=1, again=(True,), keeps_first=False):
    """Train by sharpness-aware minimisation, or adversarially.

    Args:
        back: how weights are restored before the step; "" for never.
        through_data: whether weights are written through ``data``.
        ranks: the number of ranks.
        again: whether each pass at changed weights averages its gradients over ranks.
        keeps_first: whether the gradients of the first pass count.
    """

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        parameters = list(model.parameters())
        model = DistributedDataParallel(model) if ranks > 1 else model
        optimizer = SGD(parameters, 0.1, momentum=0.9)
        torch.manual_seed(torch.distributed.get_rank() if ranks > 1 else 0)
        for _ in range(STEPS):
            rows, labels = torch.randn(8, 6), torch.randint(3, (8,))
            functional.cross_entropy(model(rows), labels).backward()
            kept = [one.detach().clone() for one in parameters]
            first = [one.grad.clone() for one in parameters]
            moves = [0.1 * one for one in first]
            written = [one.data if through_data else one for one in parameters]
            for averages in again:
                with torch.no_grad():
                    for one, move in zip(written, moves, strict=True):
                        one.add_(move)
                optimizer.zero_grad()
                with contextlib.nullcontext() if averages else model.no_sync():
                    functional.cross_entropy(model(rows), labels).backward()
            if keeps_first:
                for one, gradient in zip(parameters, first, strict=True):
                    one.grad.add_(gradient)
            with torch.no_grad():
                for one, move, old in zip(written, moves, kept, strict=True):
                    if back == "copy":
                        one.copy_(old)
                    elif back:
                        one.sub_(move)
            optimizer.step()
            optimizer.zero_grad()

    return train


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("through_data", [True, False], ids=["through data", "in place"])
@pytest.mark.parametrize("back", ["copy", "subtract", ""])
def test_sharpness_aware_minimisation_is_right_and_what_it_changes_is_not_judged(plumbline, back, through_data, ranks):
    one = plumbline.check(climb(back, through_data, ranks), ranks=ranks, steps=STEPS).trainings[0]
    assert answer_of(one) is (Answer.RIGHT if back == "copy" else Answer.RIGHT_IN_PART)
    assert one.coverage.gradients.part == 1
    assert [each for each in one.findings if "as sharpness-aware minimisation does" in each.message]
    if not back:
        assert [note for note in notes_on(one) if "parameters changed between optimizer steps" in note]


def test_gradients_that_no_pass_at_changed_weights_discards_are_noted(plumbline):
    one = plumbline.check(climb(keeps_first=True), ranks=1, steps=STEPS).trainings[0]
    assert answer_of(one) is Answer.RIGHT
    assert [note for note in notes_on(one) if "the gradients of all passes count" in note]


@pytest.mark.parametrize("keeps_first", [False, True])
def test_the_first_pass_of_adversarial_training_may_count(plumbline, keeps_first):
    script = climb(ranks=2, again=(True, True), keeps_first=keeps_first)
    assert answer_of(plumbline.check(script, ranks=2, steps=STEPS).trainings[0]) is Answer.RIGHT


def test_a_pass_at_changed_weights_that_is_not_averaged_is_wrong(plumbline):
    one = plumbline.check(climb(ranks=2, again=(False,)), ranks=2, steps=STEPS).trainings[0]
    assert next(each.cause for each in one.findings if each.outcome.is_bad) == "not-synchronised"


def test_gradients_of_a_micro_batch_are_not_discarded_on_purpose(plumbline):
    def train():
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            for _ in range(2):
                with torch.no_grad():
                    model.weight.mul_(0.999)
                optimizer.zero_grad()
                functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
            optimizer.step()

    one = plumbline.check(train, ranks=1, steps=STEPS).trainings[0]
    assert one.coverage.gradients.part == 0
    assert not [each for each in one.findings if "are discarded" in each.message]


def test_weights_that_change_before_the_first_step_are_not_praised(plumbline):
    def train():
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = Adam(model.parameters(), 1e-2)
        for step in range(STEPS):
            functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,))).backward()
            if not step:
                model.weight.data.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    one = plumbline.check(train, ranks=1, steps=STEPS).trainings[0]
    assert answer_of(one) is Answer.RIGHT_IN_PART
    assert [each.names for each in one.coverage.updates.left_out] == [("weight",)]


def test_the_gradients_of_the_last_micro_batch_alone_are_still_wrong(plumbline):
    def train():
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = Adam(model.parameters(), 1e-2)
        for _ in range(STEPS):
            for _ in range(2):
                optimizer.zero_grad()
                (functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,))) / 2).backward()
            optimizer.step()

    (wrong,) = (one for one in plumbline.check(train, ranks=1, steps=STEPS).findings if one.outcome.is_bad)
    assert wrong.cause == "only-last-micro-batch"


def test_weights_that_are_loaded_again_after_a_trial_batch_are_right(plumbline):
    def train():
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = Adam(model.parameters(), 1e-2)
        kept = copy.deepcopy(model.state_dict())
        for step in range(1 + STEPS):
            functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,))).backward()
            if step:
                optimizer.step()
            else:
                model.load_state_dict(kept)
            optimizer.zero_grad()

    assert answer_of(plumbline.check(train, ranks=1, steps=STEPS).trainings[0]) is Answer.RIGHT
