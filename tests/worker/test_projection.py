"""A projection is linear, as long as what it stands for, and the same everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.evidence import scratch_memory
from harness.evidence.projection import CHUNK, project

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BORDERS = [1, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 5000]
numbers = st.sampled_from([8, 16, 64])
seeds = st.integers(0, 10_000)
sizes = st.one_of(st.integers(0, 300), st.sampled_from(BORDERS))


def drawn(size, seed, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """The tensors are small."""


@settings(deadline=None, max_examples=30)
@given(sizes, seeds, numbers, st.floats(-1e3, 1e3))
def test_the_projection_of_a_sum_is_the_sum_of_the_projections(size, seed, numbers, factor):
    left, right = drawn(size, seed).double(), drawn(size, seed + 1).double()
    whole = project(left + factor * right, numbers).sum(0)
    parts = project(left, numbers).sum(0) + factor * project(right, numbers).sum(0)
    scale = 1 + float(left.norm()) + abs(factor) * float(right.norm())
    assert float((whole - parts).norm()) <= 1e-13 * scale


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), seeds, numbers)
def test_what_is_far_apart_does_not_meet(first, second, seed, numbers):
    """Equal and opposite pieces, chunks apart or side by side, are seen."""
    piece = drawn(first, seed)
    gap = torch.zeros(second * 100)
    tensor = torch.cat([piece, gap, -piece])
    length = float(tensor.norm())
    assert float(project(tensor, numbers).norm()) > 0.02 * length


def test_a_projection_is_as_long_as_the_tensor_on_average():
    tensors = [drawn(3000, seed) * (torch.arange(3000) % (seed % 7 + 1) == 0) for seed in range(200)]
    squares = [float(project(t, 16).norm() / t.norm()) ** 2 for t in tensors]
    assert sum(squares) / len(squares) == pytest.approx(1, abs=0.1)


@settings(deadline=None, max_examples=30)
@given(sizes, seeds, st.sampled_from(FLOATS), numbers)
def test_every_precision_is_projected_as_what_it_is(size, seed, dtype, numbers):
    tensor = drawn(size, seed, dtype)
    made, length = project(tensor, numbers), float(tensor.double().norm())
    exact = project(tensor.double(), numbers).sum(0)
    torch.testing.assert_close(made.sum(0), exact, rtol=1e-13, atol=1e-13 * (1 + length))
    assert made.shape == (2 if dtype == torch.float64 else 1, numbers)


def test_strides_do_not_count():
    matrix = drawn(600, 1).view(20, 30)
    torch.testing.assert_close(project(matrix.T, 16), project(matrix.T.contiguous(), 16), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_every_shape_has_a_projection(shape):
    made = project(torch.ones(shape), 8)
    assert made.shape == (1, 8)
    assert bool(made.any()) == (math.prod(shape) > 0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(value):
    tensor = torch.ones(3000)
    tensor[1234] = value
    assert not bool(project(tensor, 8).isfinite().all())


def test_groups_are_only_a_matter_of_caches(monkeypatch):
    tensor = drawn(300_000, 3)
    whole = project(tensor, 16)
    monkeypatch.setattr(scratch_memory, "GROUP", 8 * CHUNK)
    torch.testing.assert_close(project(tensor, 16), whole, rtol=1e-13, atol=1e-10)


def test_nobody_elses_random_numbers_are_drawn():
    before = torch.get_rng_state()
    project(drawn(100, 0), 8)
    assert torch.equal(torch.get_rng_state(), before)


VALUES = [
    4.2938232421875, 23.042449951171875, -58.610321044921875, -26.029754638671875,
    15.3526611328125, 41.30859375, 70.8720703125, 19.9481201171875,
]  # fmt: skip


def test_the_weights_are_the_same_in_every_version():
    """Ranks of several versions may project tensors that are compared."""
    assert project(torch.arange(40, dtype=torch.float32), 8).flatten().tolist() == VALUES
