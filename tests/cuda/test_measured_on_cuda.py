"""Time and memory of a device, and values read from its tensors."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import pytest
import torch

from plumbline.benchmark.timed_launch import TimedLaunch, profiled
from plumbline.evidence.projection import fingerprint, project
from plumbline.evidence.tensor_store import TensorStore, load
from plumbline.launch.cell_launch import Settings
from plumbline.machine.hardware import EnergyMeter, NoEnergyError
from plumbline.worker.timing.devices import clock_of, memory_of

pytestmark = pytest.mark.cuda


@pytest.fixture
def timed(cuda_cell, warm_pool, tmp_path):
    """Time one launch, and return its ranks' reports."""

    def measure(subject, workload, backend, topology, precision="32"):
        cell = cuda_cell(subject, workload, backend, topology, precision)
        group = TimedLaunch.begin(warm_pool(subject), cell, tmp_path, Settings(120.0))
        try:
            for _ in range(4):
                group.round()
            group.profile()
            return group.end().ranks
        finally:
            group.close()

    return measure


@pytest.mark.parametrize("workload", ["perf-mlp", "perf-resnet", "perf-gpt"])
def test_rounds_are_timed_on_the_device_in_order(timed, workload):
    (rank,) = timed("torch", workload, "none", "1x1")
    for one in (rank.warmup, *rank.rounds):
        moments = [one.begun, *(moment for step in zip(one.forwards, one.ended, strict=True) for moment in step)]
        assert all(before <= after for before, after in pairwise(moments))
        assert one.seconds > 0
    assert rank.memory["memory_reserved_peak"] >= rank.memory["memory_allocated_peak"] > 0
    assert rank.memory["out_of_memory"] == 0
    assert rank.tensors


def test_a_profiled_launch_leaves_a_trace_of_kernels_and_a_memory_snapshot(cuda_cell, warm_pool, tmp_path_factory):
    cell = cuda_cell("torch", "perf-gpt", "none", "1x1", "bf16")
    record, folder = profiled(warm_pool("torch"), cell, lambda: tmp_path_factory.mktemp("p"), Settings(120.0))
    assert record.problems == ()
    assert [file.name for file in sorted(folder.iterdir())] == ["rank-0.memory.pickle", "rank-0.trace.json.gz"]
    with gzip.open(folder / "rank-0.trace.json.gz") as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    assert (folder / "rank-0.memory.pickle").stat().st_size > 1000


def test_a_device_tells_its_energy_by_the_name_that_torch_has_for_it():
    try:
        counters = EnergyMeter().read()
    except NoEnergyError as error:
        pytest.skip(str(error))
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    if uuid is None or not counters:
        pytest.skip("this torch tells no UUID, or this device has no counter")
    assert f"GPU-{uuid}" in counters
    square = torch.randn(8192, 8192, device="cuda")
    for _ in range(40):  # half a second on a fast device: several periods of its counter
        square = square @ square / 8192
    torch.cuda.synchronize()
    assert EnergyMeter().read()[f"GPU-{uuid}"] > counters[f"GPU-{uuid}"]


@pytest.mark.cuda(devices=2)
def test_the_stages_of_a_pipeline_take_turns_on_their_devices(timed):
    ranks = timed("torch", "perf-gpt", "pp", "1x2")
    for rank in ranks:
        for step in rank.pipeline:
            assert {chunk.micro_batch for chunk in step} == set(range(4))
            assert all(before.ended <= after.begun + 1e-4 for before, after in pairwise(step))


@pytest.mark.cuda(devices=2)
def test_collectives_between_devices_are_seen(timed):
    for rank in timed("torch", "perf-gpt", "ddp", "1x2"):
        assert rank.communication is not None
        assert 0 < rank.communication <= 1


def test_a_devices_clock_follows_its_work():
    device = torch.device("cuda", 0)
    clock = clock_of([device])
    square = torch.randn(2048, 2048, device=device)
    clock.rest()
    marks = [clock.mark()]
    for _ in range(3):
        for _ in range(20):
            square = square @ square / 2048
        marks.append(clock.mark())
    times = clock.times(marks)
    assert all(before < after for before, after in pairwise(times))


def test_the_memory_of_a_device_is_its_peak():
    device = torch.device("cuda", 0)
    before = memory_of([device]).get("memory_allocated_peak", 0)
    del_me = torch.empty(before + (64 << 20), dtype=torch.uint8, device=device)
    del del_me
    assert memory_of([device])["memory_allocated_peak"] >= before + (64 << 20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(1,), (1000, 333), (3_000_001,)])
def test_what_a_tensor_is_known_by_on_a_device_is_that_on_the_cpu(dtype, size, tmp_path):
    there = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    here = there.to("cuda")
    assert fingerprint(there) == fingerprint(here)
    length = float(there.double().norm())
    torch.testing.assert_close(project(there), project(here), rtol=1e-12, atol=1e-12 * length)
    stored = TensorStore(str(tmp_path), 0).keep(here)
    assert torch.equal(load(str(tmp_path), stored), there)
