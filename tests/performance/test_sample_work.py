"""A sample's work is counted from the workload; utilisation needs a peak with a source."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plumbline.benchmark.launch_metrics import SampleWork, samples_of, work_of
from plumbline.benchmark.timed_launch import LaunchSample, LaunchTimings
from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.evidence.timing import RankTiming, Round
from plumbline.machine.peak_flops import Peak, peak_of
from plumbline.worker.timing.counted_step import ExecutedFlops
from plumbline.worker.timing.profiler import Collectives

H100 = "NVIDIA H100 80GB HBM3"
PARTS = {"compute": 0.6, "exposed_communication": 0.2, "data": 0.1, "idle": 0.1}


def cell(workload, precision="bf16", accelerator="cuda"):
    return Cell("mine", workload, "none", Topology(1, 1), precision, accelerator)


def launch(ranks=1, **looked):
    """Return a launch in which each rank trains 10 samples in 2 steps of half a second."""
    every = [
        RankTiming(
            rank,
            Round(0.0, (0.0,), (0.5,), ()),
            (Round(0.0, (0.0, 0.5), (0.5, 1.0), tuple(range(rank * 10, rank * 10 + 10))),),
            **looked,
        )
        for rank in range(ranks)
    ]
    return LaunchSample(LaunchTimings(tuple(every), 1.0))


def test_a_transformer_has_about_six_operations_a_weight_and_token():
    work = work_of(cell("perf-gpt"), H100)
    weights = 12 * 12 * 768**2 + 768 * 50257  # of the matrices: twelve blocks and the head
    assert work.tokens == 256
    assert 6 * weights * 256 <= work.flops <= 1.05 * 6 * weights * 256  # and attention


def test_a_cpu_has_no_peak():
    assert "a CPU has no stated peak" in work_of(cell("perf-mlp", accelerator="cpu"), "Intel(R) Xeon(R)").peak


def test_a_workload_without_tokens_has_none():
    assert work_of(cell("perf-mlp"), None).tokens == 0


@pytest.mark.parametrize(
    ("device", "precision", "flops"),
    [
        (H100, "bf16", 989.5e12),
        ("NVIDIA H100 PCIe", "16", 756.5e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA L4", "16", 121e12),
        ("NVIDIA L40S", "16", 362.05e12),
        ("Tesla T4", "16", 65e12),
    ],
)
def test_a_peak_has_a_source(device, precision, flops):
    peak = peak_of(device, precision)
    assert isinstance(peak, Peak)
    assert peak.flops == flops
    assert "data sheet" in peak.source


@pytest.mark.parametrize(
    ("device", "precision", "why"),
    [
        (None, "bf16", "is unknown"),
        ("AMD Instinct MI300X", "bf16", "the peak of AMD Instinct MI300X is unknown"),
        (H100, "32", "no single peak"),
        ("Tesla T4", "bf16", "does not compute in bf16"),
        ("NVIDIA A10G", "16", "the peak of NVIDIA A10G is unknown"),
        ("NVIDIA H200 NVL", "16", "the peak of NVIDIA H200 NVL is unknown"),
        (H100, "fp8", "mixes widths"),
    ],
)
def test_where_there_is_no_peak_there_is_no_utilisation_and_a_reason(device, precision, why):
    assert why in peak_of(device, precision)
    found = samples_of([launch(flops=7)], 1, SampleWork(0, 100.0, peak_of(device, precision)))
    assert not {"mfu", "hfu", "tokens_per_gpu"} & {metric for metric, _ in found}


def test_utilisation_is_the_work_of_the_samples_that_were_seen_over_the_peak():
    work = SampleWork(tokens=16, flops=30.0, peak=Peak(1000.0, "a data sheet"))
    found = samples_of([launch(2, flops=200)], 2, work)
    assert found["throughput_per_gpu", None] == [10.0]
    assert found["tokens_per_gpu", None] == [160.0]
    assert found["model_flops_per_gpu", None] == [300.0]
    assert found["mfu", None] == [pytest.approx(0.3)]
    assert found["hfu", None] == [pytest.approx(2 * 200 * 2 / 2 / 1000.0)]


def test_shares_are_told_where_every_rank_was_looked_at():
    assert samples_of([launch(2, shares=PARTS)], 2)["share_compute", None] == [pytest.approx(0.6)]
    assert not [metric for metric, _ in samples_of([launch(2)], 2) if metric.startswith("share_")]


def test_operations_that_are_executed_are_counted():
    flops = ExecutedFlops([torch.device("cpu")])
    layer = nn.Linear(8, 4, bias=False)
    flops.start()
    layer(torch.ones(2, 8)).sum().backward()
    flops.stop()
    assert flops.total == 2 * (2 * 8 * 4) * 2  # forward, and the gradient of the weights
    several = ExecutedFlops([torch.device("cpu")] * 2)
    several.start()
    several.stop()
    assert several.total is None


def test_shares_of_a_step_add_up_and_tell_data_from_computation():
    looking = Collectives("cpu")
    assert looking.shares_of(1.0) is None
    looking.start()
    looking.data_begins()
    torch.ones(300, 300) @ torch.ones(300, 300)  # a batch that is computed
    looking.data_ends()
    loading_alone = torch.ones(10)
    looking.stop()
    shares = looking.shares_of(60.0)
    assert loading_alone.sum() == 10
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["data"] > shares["compute"] > 0
    assert shares["exposed_communication"] == 0
    assert shares["idle"] > 0.5
