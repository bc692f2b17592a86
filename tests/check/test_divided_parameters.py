"""`plumbline check` on hand-written ZeRO 1: each rank steps some of the parameters, and broadcasts them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from plumbline.check.judge.noted import HeadlineNote
from plumbline.check.verdict.verdict import Answer, answer_of


def train(mistake: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))
    parameters = list(model.parameters())
    owned = parameters[rank::world]
    optimizer = torch.optim.AdamW(owned[1:] if mistake == "forgotten" and rank else owned, lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        rows, targets = torch.randn(6, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)
        model.zero_grad()
        functional.cross_entropy(model(rows), targets).backward()
        for number, one in enumerate(parameters):
            if mistake == "freed":
                dist.reduce(one.grad, number % world)
                one.grad = one.grad / world if number % world == rank else None
            elif mistake not in ("not-averaged", "alone"):
                dist.all_reduce(one.grad)
                one.grad /= world
        optimizer.step()
        for number, one in enumerate(parameters):
            owner = number + 1 if mistake == "from-another" and number == 2 else number
            if mistake != "alone" and (mistake != "not-broadcast" or number != 2):
                dist.broadcast(one.data, owner % world)


def checked(plumbline: Any, mistake: str) -> Any:
    check = plumbline.check(partial(train, mistake), ranks=2)
    assert not any(end.has_failed for end in check.ends), check.ends
    (training,) = check.trainings
    return training


@pytest.mark.parametrize("kind", ["", "freed"])
def test_all_of_a_right_training_is_judged(plumbline: Any, kind: str) -> None:
    """Gradients of parameters that other ranks step may be freed after the reduction."""
    assert answer_of(checked(plumbline, kind)) is Answer.RIGHT


@pytest.mark.parametrize(
    ("mistake", "check", "cause"),
    [
        ("not-averaged", "gradients", "not-synchronised"),
        ("not-broadcast", "update", "updates-not-broadcast"),
        ("from-another", "update", "updates-not-broadcast"),
    ],
)
def test_a_mistake_is_named(plumbline: Any, mistake: str, check: str, cause: str) -> None:
    bad = [one for one in checked(plumbline, mistake).findings if one.outcome.is_bad]
    assert {(one.check, one.cause) for one in bad if one.consequence_of is None} == {(check, cause)}


def test_a_parameter_that_no_rank_steps_is_noted(plumbline: Any) -> None:
    training = checked(plumbline, "forgotten")
    assert answer_of(training) is Answer.RIGHT
    (told,) = (one.message for one in training.findings if isinstance(one, HeadlineNote))
    assert "in no optimizer, so it never moves: 0.bias" in told


def test_ranks_that_exchange_nothing_may_train_apart(plumbline: Any) -> None:
    assert answer_of(checked(plumbline, "alone")) is Answer.NOT_JUDGED
