"""Measured workloads have a known number of steps, take little memory, and detect differences between versions."""

from __future__ import annotations

import math

import pytest
import torch

from plumbline.benchmark.measurements import workload_key
from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.workloads import PERFORMANCE, WORKLOADS
from plumbline.workloads.performance_workload import Extent

EVERY = list(PERFORMANCE.values())
MILLION = 10**6


def cell(workload="perf-mlp", devices=1, accelerator="cpu"):
    return Cell("any", workload, "none" if devices == 1 else "ddp", Topology(1, devices), "32", accelerator)


@pytest.mark.parametrize("workload", EVERY, ids=lambda workload: workload.name)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_one_epoch_is_one_batch_for_each_step(workload, devices):
    extent = workload.extent(devices)
    assert workload.epochs == 1
    assert len(workload.dataset(devices)) == extent.steps_in_all * workload.global_batch_size(devices)
    assert workload.global_batch_size(devices) % devices == 0
    assert extent.boundaries[workload.rounds] == extent.warmup + workload.rounds * extent.steps


def test_boundaries_are_after_the_warm_up_each_round_a_step_that_is_looked_at_and_some_more():
    assert Extent(warmup=3, rounds=2, steps=10).boundaries == (3, 13, 23, 24, 32)


@pytest.mark.parametrize("workload", EVERY, ids=lambda workload: workload.name)
def test_data_take_no_memory_worth_mentioning(workload):
    dataset = workload.dataset(8)
    assert sum(column.numel() * column.element_size() for column in dataset.columns.values()) < 8 * MILLION


@pytest.mark.parametrize("workload", EVERY, ids=lambda workload: workload.name)
def test_samples_have_indices_of_their_own_and_are_the_same_one_by_one_or_in_a_batch(workload):
    dataset = workload.dataset(8)
    chosen = [0, 1, 70, len(dataset) - 1]
    together = dataset.batch(chosen)
    for place, index in enumerate(chosen):
        for name, value in dataset[index].items():
            assert torch.equal(value, together[name][place])
    assert together["index"].tolist() == chosen
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_weak_workloads_keep_a_devices_batch_and_strong_ones_that_of_all():
    for workload in EVERY:
        batches = [workload.global_batch_size(devices) for devices in (1, 2, 4, 8)]
        assert batches == ([batches[0]] * 4 if workload.strong else [batches[0] * k for k in (1, 2, 4, 8)])


@pytest.mark.parametrize("workload", EVERY, ids=lambda workload: workload.name)
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_a_workload_trains_as_large_as_it_says(workload, accelerator):
    workload = workload.on(accelerator)
    with torch.device("meta"):
        model = workload.build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters > 10_000
    if accelerator == "cpu":
        model, batch = workload.model(), workload.dataset(1).batch(range(2))
        assert math.isfinite(workload.loss(model(batch), batch).item())


def test_the_transformer_has_the_most_to_average_for_what_it_computes_and_the_perceptron_the_least_to_do():
    def size(name):
        return sum(parameter.numel() for parameter in PERFORMANCE[name].model().parameters())

    assert size("perf-gpt") > 10 * size("perf-resnet")
    assert size("perf-mlp") < size("perf-gpt") / 10


def test_names_are_nobody_elses():
    assert not PERFORMANCE.keys() & WORKLOADS.keys()


def test_a_key_tells_one_definition_from_another_and_nothing_else():
    key = workload_key(cell())
    assert key == workload_key(cell())
    assert key == workload_key(Cell("other", "perf-mlp", "none", Topology(1, 1), "bf16", "cpu", seed=7))
    others = [cell("perf-resnet"), cell(devices=2), cell(accelerator="cuda")]
    assert len({key, *map(workload_key, others)}) == 4


def test_other_steps_are_another_definition(monkeypatch):
    key = workload_key(cell())
    monkeypatch.setattr(type(PERFORMANCE["perf-mlp"]), "rounds", 7)
    assert workload_key(cell()) != key
