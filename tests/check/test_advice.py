"""Advice if gradients are not averaged over all ranks or micro-batches: how to change the script."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from plumbline.check.function import check_function
from plumbline.check.judge.gradients import CHECK

STEPS, WORLD = 4, 2


def start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    torch.manual_seed(1 + dist.get_rank())
    return model


def fit(model, *, window=1, before_forward=lambda place: None, after_backward=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        for index in range(window):
            before_forward(index)
            loss = functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,)))
            (loss / window).backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()


def over_a_group_of_one():
    model = start()
    groups = [dist.new_group([rank]) for rank in range(WORLD)]
    fit(DistributedDataParallel(model, process_group=groups[dist.get_rank()]))


def kept(state, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def with_a_hook_that_keeps_gradients():
    model = DistributedDataParallel(start())
    model.register_comm_hook(None, kept)
    fit(model)


def broadcast_by_one_rank():
    model = start()

    def broadcast():
        for one in model.parameters():
            dist.broadcast(one.grad, 0)

    fit(model, after_backward=broadcast)


def synchronised_at_the_first_micro_batch():
    model = fully_shard(start())
    fit(model, window=3, before_forward=lambda place: model.set_requires_gradient_sync(place == 0))


def with_losses_that_wait_for_each_other():
    model = DistributedDataParallel(start())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        losses = [functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,))) / 2 for _ in range(2)]
        for one in losses:
            one.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("train", "cause", "advice"),
    [
        (over_a_group_of_one, "not-synchronised", "DistributedDataParallel averages over 1 rank of 2"),
        (with_a_hook_that_keeps_gradients, "not-synchronised", "check that the communication hook kept averages"),
        (broadcast_by_one_rank, "another-ranks-gradient", "a single rank's samples; average gradients over ranks"),
        (
            with_losses_that_wait_for_each_other,
            "some-micro-batches-not-synchronised",
            "several backward passes follow the last call of the DistributedDataParallel object",
        ),
        (synchronised_at_the_first_micro_batch, "last-micro-batches-one-step-late", "at the last micro-batch"),
    ],
)
def test_advice_names_what_the_script_does(train, cause, advice):
    (found,) = (one for one in check_function(train, ranks=WORLD).findings if one.check == CHECK)
    assert found.cause == cause
    assert advice in found.message
