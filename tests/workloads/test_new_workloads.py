"""The narrow workloads: each can expose its mistakes, and is planned where that suffices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from plumbline.core.backend import BACKENDS
from plumbline.core.precision import PRECISIONS
from plumbline.core.topology import Topology
from plumbline.core.training_behavior import EVERY_OTHER
from plumbline.judge.oracle.oracle import Oracle, gather, mean_gradient
from plumbline.planning.declaration import Declaration
from plumbline.planning.plan import Matrix, plan
from plumbline.subjects.declare import CAPABILITIES
from plumbline.trainer.nested import gather as trainers_gather
from plumbline.workloads import WORKLOADS
from plumbline.workloads.randomness import KeyedDropout

NARROW = [name for name, workload in WORKLOADS.items() if workload.narrow]
DEVICES = (1, 3, 4)

ABLE = Declaration("able", "able.py", tuple(BACKENDS), {EVERY_OTHER: PRECISIONS}, CAPABILITIES)


def in_order(workload, devices):
    """Return the layouts of an epoch's batches, in order, on one device."""
    count, size = len(workload.dataset(devices)), workload.global_batch_size(devices)
    return [(((tuple(range(start, min(start + size, count))),),),) for start in range(0, count, size)]


def length(gradient):
    return torch.cat([value.flatten() for value in gradient.values()]).norm()


def cells(**options):
    return [planned.cell for planned in plan(Matrix(**options), [ABLE])]


SEVERAL = [one for one in BACKENDS.values() if one.dimensions and not one.chosen_by_trainer and not one.sampled]
"""Backends with several devices whose cells are planned without being named."""


def test_the_needs_of_every_workload_can_be_declared():
    assert all(workload.needs <= CAPABILITIES for workload in WORKLOADS.values())


@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_workload_has_few_cells_whether_or_not_it_is_asked_for(name):
    asked = cells(gpus=8, workloads=(name,))
    assert asked == [cell for cell in cells(gpus=8) if cell.workload == name]
    places = {(cell.backend, str(cell.topology)) for cell in asked}
    asks_one = not WORKLOADS[name].elastic and not WORKLOADS[name].experts  # elastic ones use other devices
    alone = {("none", "1x1")} if asks_one else set()
    suited = [one for one in SEVERAL if (one.opt_in if WORKLOADS[name].experts else not one.divides_experts)]
    # The last batch of metrics does not divide into micro-batches.
    stages = {("balanced", "1x2")} if WORKLOADS[name].couples_stages and name != "metrics" else set()
    smallest = {(one.name, "1x3" if one.fits(Topology(1, 3)) else str(one.smallest)) for one in suited}
    # Few workloads suit three parts of a sequence, or experts on three devices.
    few = {(one.name, "1x2") for one in suited if one.divides_sequences or one.divides_experts}
    assert places == {*alone, *stages, *few, *smallest}
    assert {cell.precision for cell in asked} == set(WORKLOADS[name].precisions)


def test_a_small_budget_still_has_several_devices():
    places = {(cell.backend, str(cell.topology)) for cell in cells(gpus=2, workloads=("clipping",))}
    fitting = {(one.name, "1x2") for one in SEVERAL if one.fits(Topology(1, 2)) and not one.divides_experts}
    assert places == {("none", "1x1"), ("balanced", "1x2")} | fitting


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_what_nccl_cannot_average_is_refused_where_there_is_nccl(accelerator):
    refused = {
        p.cell.backend for p in plan(Matrix(4, workloads=("embedding-sparse",), accelerator=accelerator), [ABLE])
        if p.refusal and p.cell.parallelism.micro_batches == 1  # stages are refused for another reason
        and (accelerator == "cuda" or not p.cell.parallelism.divides_sequences)  # it has no sequence
    }  # fmt: skip
    several = {
        one.name
        for one in SEVERAL
        if one.name != "dp" and not one.divides_experts and one.micro_batches == 1 and one.smallest.devices <= 4
    }
    assert refused == (several if accelerator == "cuda" else set())


@pytest.mark.parametrize("name", [name for name in NARROW if WORKLOADS[name].accumulate > 1])
def test_the_last_window_is_short_but_where_something_else_is_asked(name):
    assert bool(WORKLOADS[name].steps_per_epoch % WORKLOADS[name].accumulate) == (name != "validation")


@pytest.mark.parametrize("name", ["accumulation", "accumulation-tokens"])
@pytest.mark.parametrize("devices", DEVICES)
def test_micro_batches_are_clearly_unlike(name, devices):
    oracle = Oracle(WORKLOADS[name], devices)
    gradients = [oracle.gradient(layout) for layout in in_order(WORKLOADS[name], devices)]
    mean = mean_gradient([[gradient] for gradient in gradients])
    for gradient in gradients:
        assert length({name: gradient[name] - mean[name] for name in mean}) > 0.1 * length(mean)


@pytest.mark.parametrize("name", [name for name in NARROW if WORKLOADS[name].clip_norm and name != "clipping-tied"])
@pytest.mark.parametrize("devices", DEVICES)
def test_clipping_bites_at_every_step(name, devices):
    workload = WORKLOADS[name]
    oracle = Oracle(workload, devices)
    optimizer = oracle.optimizer()
    for _ in range(workload.epochs):
        for layout in in_order(workload, devices):
            assert length(mean_gradient(oracle.group_gradients(layout))) > 5 * workload.clip_norm
            oracle.set_gradients(oracle.gradient(layout))
            optimizer.step()


@pytest.mark.parametrize("devices", DEVICES)
def test_clipping_of_tied_weights_bites_at_some_steps_and_would_at_others_if_they_counted_twice(devices):
    workload = WORKLOADS["clipping-tied"]
    oracle, limit, norms, counted_twice = Oracle(workload, devices), workload.clip_norm, [], []
    optimizer = oracle.optimizer()
    for _ in range(workload.epochs):
        for layout in in_order(workload, devices):
            raw = mean_gradient(oracle.group_gradients(layout))
            norms.append(length(raw))
            counted_twice.append(math.hypot(norms[-1], length({"tied": raw["tokens.weight"]})))
            oracle.set_gradients(oracle.gradient(layout))
            optimizer.step()
    assert min(norms) < limit < max(norms)
    assert any(once < limit < twice for once, twice in zip(norms, counted_twice, strict=True))


@pytest.mark.parametrize("name", [name for name in NARROW if "scheduler" in WORKLOADS[name].needs])
def test_every_step_has_another_rate_than_the_step_before(name):
    workload = WORKLOADS[name]
    optimizer = workload.optimizer(workload.model().parameters())
    schedule = workload.scheduler(optimizer)
    rates = []
    for _ in range(workload.epochs * workload.steps_per_epoch):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert all(left != right for left, right in itertools.pairwise(rates))


def test_groups_follow_the_dimensions():
    model = WORKLOADS["adamw"].model()
    matrices, vectors = WORKLOADS["adamw"].optimizer(model.parameters()).param_groups
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}
    assert matrices["lr"] != vectors["lr"]
    assert matrices["weight_decay"] != vectors["weight_decay"] == 0


def test_masks_follow_the_sample_the_layer_and_the_unit():
    index, x = torch.arange(500), torch.ones(500, 64)
    masks = KeyedDropout(1)(x, index)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    assert torch.equal(KeyedDropout(1)(x, index[order]), masks[order])
    assert set(masks.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(KeyedDropout(1).eval()(x, index), x)
    # Independent fair coins: correlations of 500 × 64 tosses are within 5 standard deviations.
    coins, others = masks - 1, KeyedDropout(2)(x, index) - 1
    for product in (coins, coins * others, coins[1:] * coins[:-1], coins[:, 1:] * coins[:, :-1]):
        assert abs(float(product.mean())) < 5 / product.numel() ** 0.5


@pytest.mark.parametrize("devices", DEVICES)
def test_tied_weights_are_one_parameter_and_the_keys_bias_has_no_gradient(devices):
    oracle = Oracle(WORKLOADS["transformer"], devices)
    assert oracle.model.head.weight is oracle.model.tokens.weight
    assert "head.weight" not in oracle.parameters
    gradient = oracle.gradient(in_order(oracle.workload, devices)[0])
    assert gradient["attention.key.bias"].norm() < 1e-14 * gradient["attention.query.bias"].norm()


def test_a_causal_model_does_not_look_ahead():
    model, batch = WORKLOADS["transformer"].model(), WORKLOADS["transformer"].dataset(1).batch([0])
    later = {**batch, "tokens": batch["tokens"].clone()}
    later["tokens"][0, 5] = (later["tokens"][0, 5] + 1) % 20
    changed = (model(batch) - model(later)).abs().sum(-1)[0]
    assert not changed[:5].any()
    assert changed[5:].all()


def test_shares_have_rows_of_their_own():
    workload = WORKLOADS["embedding-sparse"]
    model, data = workload.model(), workload.dataset(3)
    rows = []
    for share in torch.arange(24).chunk(3):
        model.zero_grad()
        workload.loss(model(data.batch(share)), data.batch(share)).backward()
        assert model.embedding.weight.grad.is_sparse
        rows.append(set(model.embedding.weight.grad.coalesce().indices()[0].tolist()))
    assert all(own - other for own in rows for other in rows if own is not other)


def test_judge_and_trainer_gather_nested_outputs_alike():
    workload = WORKLOADS["nested-outputs"]
    model, data = workload.model(), workload.dataset(2)
    parts = [model(data.batch(share)) for share in torch.arange(24).chunk(2)]
    ours, theirs = gather(parts), trainers_gather(parts)
    assert ours["rest"][1][1].shape == (2,)
    for left, right in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs), strict=True):
        assert torch.equal(left, right)
    torch.testing.assert_close(workload.loss(ours, data.batch(range(24))), one_device_loss(workload))


def one_device_loss(workload):
    data = workload.dataset(2)
    return workload.loss(workload.model()(data.batch(range(24))), data.batch(range(24)))


def test_gradients_flow_through_frozen_layers():
    oracle = Oracle(WORKLOADS["frozen"], 1)
    gradient = oracle.gradient(in_order(oracle.workload, 1)[0])
    assert set(gradient) == set(oracle.trained) == {"first.bias", "last.weight", "last.bias"}
    assert gradient["first.bias"].norm() > 0


@pytest.mark.parametrize("devices", DEVICES[1:])
def test_only_some_ranks_take_the_branch(devices):
    hard = WORKLOADS["unused-parameters"].dataset(devices).columns["hard"]
    taken = [bool(share.any()) for step in hard.split(24) for share in step.chunk(devices)]
    assert 0 < sum(taken) < len(taken)


@pytest.mark.parametrize("devices", DEVICES)
def test_the_branch_is_unused_in_the_last_step_alone(devices):
    workload = WORKLOADS["unused-at-the-end"]
    *before, last = workload.dataset(devices).columns["hard"].split(workload.global_batch_size(devices))
    assert all(step.all() for step in before)
    assert not last.any()


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("scale", [2.0**9, 2.0**16, 2.0**20])
def test_only_float16_overflows_and_only_where_it_is_planned(devices, scale):
    workload = WORKLOADS["overflow"]
    for precision in (None, *PRECISIONS.values()):
        oracle = Oracle(workload, devices, precision)
        for step, (((share,),),) in enumerate(in_order(workload, devices)):
            ranks = torch.tensor(share).chunk(devices)
            finite = []
            for rank in ranks:
                ((gradient,),) = oracle.group_gradients((((tuple(rank.tolist()),),),), scale)
                finite.append(all(bool(value.isfinite().all()) for value in gradient.values()))
            if precision is not None and precision.scaled:
                if scale <= 2.0**16:  # above it, ordinary samples may overflow too
                    assert finite.count(False) == (step == 1)
                else:
                    assert step != 1 or not all(finite)
            else:
                assert all(finite)


@pytest.mark.parametrize("devices", [2, 3, 4, 5, 6, 8])
def test_the_uneven_dataset_is_a_multiple_of_nothing(devices):
    workload = WORKLOADS["uneven"]
    count = len(workload.dataset(devices))
    assert count % devices
    assert count % workload.global_batch_size(devices)
    assert -(-count // workload.global_batch_size(devices)) == workload.steps_per_epoch


def test_an_evaluation_falls_into_a_window():
    workload = WORKLOADS["validation"]
    evaluations = range(workload.validate_every, workload.steps_per_epoch + 1, workload.validate_every)
    inside = [number for number in evaluations if number % workload.accumulate and number < workload.steps_per_epoch]
    assert inside
    # More than one micro-batch is left of that window, so the loss differs from losing all but the last one.
    assert workload.accumulate - inside[0] % workload.accumulate > 1


INTERRUPTED = [name for name, workload in WORKLOADS.items() if workload.interrupt_after]


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interruption_is_in_the_middle_of_the_second_epoch(name):
    """Steps of the epoch come before and after it, even if one in each epoch is skipped and not counted."""
    workload = WORKLOADS[name]
    steps = -(-workload.steps_per_epoch // workload.accumulate)
    skipped = workload.epochs if "16" in workload.precisions else 0
    assert steps >= 4
    assert steps + 1 < workload.interrupt_after < workload.epochs * steps - 1 - skipped


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interruption_finds_a_state_that_can_be_lost(name):
    workload = WORKLOADS[name]
    oracle = Oracle(workload, 1)
    optimizer = oracle.optimizer()
    oracle.set_gradients(oracle.gradient(in_order(workload, 1)[0]))
    optimizer.step()
    for parameter in oracle.parameters.values():
        moments = [value for value in optimizer.every[0].state[parameter].values() if value.dim()]
        assert moments
        assert all(moment.norm() > 0 for moment in moments)


def test_what_is_remembered_follows_from_the_weights_and_changes_what_follows():
    workload = WORKLOADS["checkpoint"]
    model, data = workload.model(), workload.dataset(1)
    first = model(data.batch(range(4)))
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    other = workload.model()
    other(data.batch(range(20, 27)))
    assert all(torch.equal(value, buffers[name]) for name, value in other.named_buffers())
    with torch.no_grad():
        model.first.bias += 1
    model(data.batch(range(4)))
    assert all(not torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert not torch.equal(model(data.batch(range(4))), first)
    remembered = {name: value.clone() for name, value in model.named_buffers()}
    model.eval()(data.batch(range(4)))
    assert all(torch.equal(value, remembered[name]) for name, value in model.named_buffers())


def test_one_device_more_or_less_has_the_same_batches():
    """Otherwise, an elastic training could not match on another number of devices."""
    workload = WORKLOADS["checkpoint-elastic"]
    assert {workload.global_batch_size(devices) for devices in (1, 2, 3, 4, 6)} == {workload.batch_size}
    position = workload.interrupt_after - workload.steps_per_epoch
    for then, now in ((2, 3), (3, 2)):  # a position counted per rank is far from the right one
        assert abs(position * now // then - position) > 1
