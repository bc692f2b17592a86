"""The fixture ``plumbline``: a training function is checked on forked ranks."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(forward=lambda model: model):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        loss = nn.functional.cross_entropy(forward(model)(torch.randn(5, 6)), torch.randint(3, (5,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def test_a_right_training_passes(plumbline):
    checked = plumbline.check(train, ranks=2, steps=2)
    checked.assert_right()
    assert len(checked.values) == 2
    assert repr(checked) == f"RIGHT: {checked.sentence}"


def test_a_training_that_never_synchronises_fails_with_its_cause(plumbline):
    checked = plumbline.check(lambda: train(lambda model: model.module), ranks=2, steps=2)
    with pytest.raises(AssertionError, match=r"wrong: gradients: not synchronised"):
        checked.assert_right()


def test_a_rank_that_raises_is_named(plumbline):
    checked = plumbline.check(lambda: [][0], ranks=1)
    with pytest.raises(AssertionError, match=r"rank 0 raised"):
        checked.assert_right()


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (3, {}, r"check\(\) takes a training function, not int: write check\(train\)"),
        (train, {"ranks": 0}, "ranks=0 must be a whole number, 1 or more"),
        (train, {"steps": 0}, "steps=0 must be a whole number, 1 or more"),
        (train, {"after": None}, "after=None must be"),
        (train, {"objective": "x"}, "unknown objective"),
        (train, {"timeout": "a"}, "must be a number of seconds above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_ranks_start(plumbline, function, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        plumbline.check(function, **options)


def test_a_function_that_does_not_train_is_no_success(plumbline):
    with pytest.raises(AssertionError, match="no optimizer"):
        plumbline.check(lambda: None, ranks=1).assert_right()


def test_a_parameter_in_no_optimizer_is_told(plumbline):
    def forgets():
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        optimizer = torch.optim.SGD([*model[0].parameters(), model[1].weight], 0.1)
        for _ in range(2):
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    checked = plumbline.check(forgets, ranks=1, steps=2)
    checked.assert_right()
    assert [one.message for one in checked.findings if "1.bias" in one.message and "no optimizer" in one.message]
