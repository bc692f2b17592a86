"""The judge says of sketched evidence what it says of the whole: of right trainers nothing, of wrong ones why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.core.finding import diagnosis
from harness.core.outcome import Outcome, worst
from harness.evidence.projection import project, sketched
from harness.evidence.trace import Sketch
from harness.judge.judge import judge
from harness.judge.reconstruct import whole_trace
from harness.judge.reconstruct.inverse_projection import Projection, correction, lift, sample
from harness.launch.cell_launch import launch
from harness.launch.settings import Settings
from harness.workloads import WORKLOADS

EVERYBODY = Path(__file__).parents[2] / "suites" / "detection" / "everybody.py"
ABOVE = 64
"""Tensors of our workloads have up to 1024 entries, and 16 numbers are kept of those that have more than this."""

seeds = st.integers(0, 1000)


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 3000), st.sampled_from([8, 16, 64]), seeds)
def test_a_projection_is_the_operator_that_sketches_are_made_with(size, numbers, seed):
    projection, tensor, values = Projection((size,), numbers), normal(size, seed), normal(numbers, seed)
    torch.testing.assert_close(projection.apply(tensor), project(tensor, numbers).sum(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(projection.of(tensor).sum(0), project(tensor, numbers).sum(0), rtol=1e-12, atol=1e-12)
    assert float(projection.apply(tensor) @ values) == pytest.approx(
        float(tensor @ projection.spread(values)), abs=1e-8
    )


@given(st.integers(1, 3000), st.sampled_from([8, 16, 64]), seeds)
def test_what_is_lifted_leaves_the_sketch_and_is_the_least_that_does(size, numbers, seed):
    projection, tensor = Projection((size,), numbers), normal(size, seed)
    values = project(tensor, numbers).sum(0)
    lifted = lift(values, projection)
    torch.testing.assert_close(projection.apply(lifted), values, rtol=1e-6, atol=1e-6)
    assert float(lifted.norm()) <= float(tensor.norm()) * (1 + 1e-9)


@given(st.integers(200, 3000), seeds)
def test_a_sample_is_as_long_as_what_was_sketched_and_zero_where_that_is(size, seed):
    projection, sizes = Projection((size,), 64), normal(size, seed).abs()
    sizes[: size // 3] = 0
    tensor = 3 * sizes * normal(size, seed + 1)
    found, times = sample(project(tensor, 64).sum(0), projection, sizes, seed + 2)
    torch.testing.assert_close(projection.apply(found), project(tensor, 64).sum(0), rtol=1e-6, atol=1e-8)
    assert float(found.norm()) == pytest.approx(float(tensor.norm()), rel=0.7)
    assert times == pytest.approx(3, rel=0.7)
    assert not bool(found[: size // 3].any())


def test_a_correction_cannot_be_seen_in_the_sketch_and_explains_what_came_of_it():
    projection, sizes, slope = Projection((2000,), 64), normal(2000, 1).abs(), normal(2000, 2)
    hidden = sizes * normal(2000, 3)
    hidden -= lift(projection.apply(hidden), projection, sizes)
    residual = projection.apply(slope * hidden)
    change, surprise = correction(residual, projection, slope, sizes, torch.full((2000,), 1e-9))
    assert float(projection.apply(change).norm()) < 1e-8
    torch.testing.assert_close(projection.apply(slope * change), residual, rtol=1e-5, atol=1e-5)
    assert surprise < 2
    assert correction(100 * residual, projection, slope, sizes, torch.full((2000,), 1e-9))[1] > 20


@pytest.mark.parametrize("precision", ["64", "32", "16", "bf16"])
@pytest.mark.parametrize(
    ("workload", "backend", "topology"),
    [
        ("mlp", "ddp", "1x2"),
        ("lm-tokens", "ddp", "1x3"),
        ("contrastive", "dp", "1x2"),
        ("adam", "ddp", "1x2"),
        ("adamw", "none", "1x1"),
        ("transformer", "none", "1x1"),
    ],
)
def test_right_trainers_are_right(simulation, cell_of, workload, backend, topology, precision):
    workload, cell = WORKLOADS[workload], cell_of(workload, backend, topology, precision)
    whole = simulation.right_trace(workload, cell, seed=1)
    outcomes = [
        {name: finding.outcome for name, finding in simulation.judge(trace, workload, cell).items()}
        for trace in (whole, sketched(whole, ABOVE))
    ]
    assert outcomes[0] == outcomes[1]


def test_exact_workloads_stay_exact(simulation, cell_of):
    workload, cell = WORKLOADS["linear-exact"], cell_of("linear-exact", "ddp", "1x2")
    whole = simulation.right_trace(workload, cell)
    found = whole_trace(sketched(whole, 8), workload, cell)
    for rank, other in zip(whole.ranks, found.ranks, strict=True):
        for step, again in zip(rank.steps, other.steps, strict=True):
            for part in ("before", "gradients", "after"):
                assert all(torch.equal(v, getattr(again, part)[n]) for n, v in getattr(step, part).items())


def test_the_same_bits_are_the_same_tensor_and_others_are_not(simulation, cell_of):
    workload, cell = WORKLOADS["mlp"], cell_of("mlp", "ddp", "1x2")
    first, second = whole_trace(sketched(simulation.right_trace(workload, cell), ABOVE), workload, cell).ranks
    for step, other in zip(first.steps, second.steps, strict=True):
        for name, value in step.after.items():
            assert value is other.after[name] or value.numel() <= ABOVE
            assert torch.equal(value, other.after[name])
            assert not torch.equal(value, step.before[name])


def test_what_is_not_finite_stays_so(simulation, cell_of):
    workload, cell = WORKLOADS["overflow"], cell_of("overflow", "ddp", "1x2", "16")
    whole = simulation.right_trace(workload, cell)
    found = whole_trace(sketched(whole, ABOVE), workload, cell)
    steps = list(zip(whole.ranks[0].steps, found.ranks[0].steps, strict=True))
    assert any(step.skipped for step, _ in steps)
    for step, again in steps:
        for name, value in step.gradients.items():
            assert bool(value.isfinite().all()) == bool(again.gradients[name].isfinite().all())


def test_a_trace_without_sketches_is_left_alone(simulation, cell_of):
    workload, cell = WORKLOADS["mlp"], cell_of("mlp", "none", "1x1")
    trace = simulation.right_trace(workload, cell)
    assert whole_trace(trace, workload, cell) is trace


@pytest.mark.parametrize(
    ("subject", "workload", "backend", "topology"),
    [
        ("summed-not-averaged", "mlp", "ddp", "1x2"),
        ("divided-although-ddp-averages", "mlp", "ddp", "1x2"),
        ("rank-zero-broadcasts-its-own-gradient", "mlp", "ddp", "1x2"),
        ("forward-through-the-inner-module", "mlp", "ddp", "1x2"),
        ("never-zeroed", "mlp", "ddp", "1x2"),
        ("one-parameter-forgotten", "mlp", "ddp", "2x2"),
        ("each-device-its-own-negatives", "contrastive", "dp", "1x2"),
    ],
)
def test_wrong_trainers_are_found_with_the_same_cause(
    warm_pool, cell_of, tmp_path, subject, workload, backend, topology
):
    cell = cell_of(workload, backend, topology, subject=subject)
    whole = launch(warm_pool(EVERYBODY), cell, tmp_path, Settings(300))
    told = diagnosis(judge(whole, WORKLOADS[workload], cell))
    again = diagnosis(judge(sketched(whole, ABOVE), WORKLOADS[workload], cell))
    assert told is not None
    assert (again.check, again.cause, again.family, again.step) == (told.check, told.cause, told.family, told.step)


def test_ranks_record_sketches(warm_pool, cell_of, tmp_path):
    cell = cell_of("mlp", "ddp", "1x2", subject="torch")
    trace = launch(warm_pool("torch"), cell, tmp_path, Settings(300, sketch_above=ABOVE))
    kinds = {name: isinstance(value, Sketch) for name, value in trace.ranks[1].steps[0].gradients.items()}
    assert kinds == {name: name.endswith("weight") for name in kinds}
    assert worst(finding.outcome for finding in judge(trace, WORKLOADS["mlp"], cell)) is Outcome.PASSED
