"""The oracle's gradient equals autograd's for the backend's contract, written by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.evidence.trace import MicroBatch, Step
from plumbline.judge.oracle.layout import contract_layout, one_device_layout, samples, shuffled
from plumbline.judge.oracle.oracle import Oracle
from plumbline.workloads import WORKLOADS

BATCH = tuple(range(24))
WHOLE = [name for name, workload in WORKLOADS.items() if not workload.narrow]


def one_device(model, data, loss):
    return loss(model(data.batch(BATCH)), data.batch(BATCH))


def data_parallel(model, data, loss, batch=BATCH, devices=2):
    size = len(batch) // devices
    outputs = [model(data.batch(batch[start : start + size])) for start in range(0, len(batch), size)]
    return loss(torch.cat(outputs), data.batch(batch))


def distributed(model, data, loss):
    shares = BATCH[:10], BATCH[10:16], BATCH[16:]
    return sum(loss(model(data.batch(share)), data.batch(share)) for share in shares) / 3


def nodes_of_replicas(model, data, loss):
    return (data_parallel(model, data, loss, BATCH[:12]) + data_parallel(model, data, loss, BATCH[12:])) / 2


def accumulated(model, data, loss):
    return (data_parallel(model, data, loss, BATCH[:12], 1) + data_parallel(model, data, loss, BATCH[12:], 1)) / 2


LAYOUTS = {
    one_device: (((BATCH,),),),
    data_parallel: (((BATCH[:12], BATCH[12:]),),),
    distributed: (((BATCH[:10],), (BATCH[10:16],), (BATCH[16:],)),),
    nodes_of_replicas: (((BATCH[:6], BATCH[6:12]), (BATCH[12:18], BATCH[18:])),),
    accumulated: (((BATCH[:12],),), ((BATCH[12:],),)),
}


@pytest.mark.parametrize("by_hand", LAYOUTS)
@pytest.mark.parametrize("name", WHOLE)
def test_the_gradient_is_that_of_the_contract(name, by_hand):
    workload = WORKLOADS[name]
    model = workload.model(torch.float64).train()
    by_hand(model, workload.dataset(1, torch.float64), workload.loss).backward()
    found = Oracle(workload, 1).gradient(LAYOUTS[by_hand])
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_scale_that_is_a_power_of_two_changes_nothing(name):
    oracle = Oracle(WORKLOADS[name], 1)
    plain, scaled = oracle.gradient((((BATCH,),),)), oracle.gradient((((BATCH,),),), 65536.0)
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


def layouts():
    share = st.lists(st.integers(0, 99), min_size=1, max_size=6).map(tuple)
    group = st.lists(share, min_size=1, max_size=3).map(tuple)
    return st.lists(st.lists(group, min_size=1, max_size=4).map(tuple), min_size=1, max_size=3).map(tuple)


def multisets(layout):
    return [Counter(tuple(sorted(tuple(sorted(share)) for share in group)) for group in groups) for groups in layout]


@given(layouts(), st.integers())
def test_another_order_keeps_the_samples_of_a_device_together_in_their_group(layout, seed):
    other = shuffled(layout, random.Random(seed))
    assert multisets(other) == multisets(layout)


@given(layouts())
def test_one_device_takes_the_same_samples_a_micro_batch(layout):
    together = one_device_layout(layout)
    assert Counter(samples(together)) == Counter(samples(layout))
    assert [len(groups) for groups in together] == [1] * len(layout)


def step(*micro_batches):
    return Step(micro_batches, {}, {}, {}, ())


def test_each_rank_has_its_own_share():
    ranks = [step(MicroBatch(((0, 1),), (0, 1))), step(MicroBatch(((2,),), (2,)))]
    assert contract_layout(ranks, 1, 1) == ((((0, 1),), ((2,),)),)


def test_the_devices_of_a_process_are_one_group():
    ranks = [step(MicroBatch(((0,), (1,)), (0, 1)))]
    assert contract_layout(ranks, 2, 1) == ((((0,), (1,)),),)


def test_micro_batches_are_those_the_workload_accumulates():
    rank = step(*(MicroBatch(((i,),), (i,)) for i in range(3)))
    assert contract_layout([rank], 1, 3) == ((((0,),),), (((1,),),), (((2,),),))
    assert contract_layout([rank], 1, 1) == ((((0, 1, 2),),),), "nobody asked for them"


def test_a_short_last_window_has_fewer_micro_batches():
    rank = step(MicroBatch(((0,),), (0,)))
    assert contract_layout([rank], 1, 4) == ((((0,),),),)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_devices_with_a_loss_of_the_subject_are_put_together(accumulate):
    forwards = [MicroBatch(((i,),)) for i in range(2 * accumulate)]
    expected = tuple((((2 * index,), (2 * index + 1,)),) for index in range(accumulate))
    assert contract_layout([step(*forwards)], 2, accumulate) == expected
