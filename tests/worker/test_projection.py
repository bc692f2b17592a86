"""A projection is linear, as long as its tensor on average, the same everywhere; fingerprints tell tensors apart."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbline.evidence import projection
from plumbline.evidence.projection import CHUNK, GROUP, fingerprint, fingerprints, project

pytestmark = pytest.mark.usefixtures("one_thread")  # the tensors are small

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BORDERS = [1, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 5000]
numbers = st.sampled_from([8, 16, 64])
seeds = st.integers(0, 10_000)
sizes = st.one_of(st.integers(0, 300), st.sampled_from(BORDERS))


def drawn(size, seed, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


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
    made, exact = project(tensor, numbers), project(tensor.double(), numbers)
    length = float(tensor.double().norm())
    torch.testing.assert_close(made.sum(0), exact.sum(0), rtol=1e-13, atol=1e-13 * (1 + length))
    assert made.shape == (2 if dtype == torch.float64 else 1, numbers)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3000), seeds, st.sampled_from(FLOATS), st.data())
def test_fingerprints_are_equal_where_tensors_are_and_nowhere_else(size, seed, dtype, data):
    tensor = drawn(size, seed, dtype)
    assert fingerprint(tensor.clone()) == fingerprint(tensor)
    other = tensor.clone()
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4, unique=True))
    change = data.draw(st.sampled_from(["sign", "zero", "next", "rotate"]))
    if change == "sign":
        other[places] *= -1
    elif change == "zero":
        other[places] = 0
    elif change == "next":
        other[places] = torch.nextafter(other[places], torch.full_like(other[places], math.inf))
    else:
        other[places] = other[places].roll(1)
    assert (fingerprint(other) == fingerprint(tensor)) == torch.equal(other, tensor)


def test_a_negative_zero_is_a_zero():
    assert fingerprint(torch.tensor([-0.0, 1.0])) == fingerprint(torch.tensor([0.0, 1.0]))


def test_the_order_of_the_entries_counts_and_strides_do_not():
    matrix = drawn(600, 1).view(20, 30)
    assert fingerprint(matrix.T) == fingerprint(matrix.T.contiguous()) != fingerprint(matrix)
    torch.testing.assert_close(project(matrix.T, 16), project(matrix.T.contiguous(), 16), rtol=0, atol=0)
    wider = torch.zeros(20, 31)
    wider[:, 1:] = matrix
    assert fingerprint(wider[:, 1:]) == fingerprint(matrix)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_every_shape_has_a_projection(shape):
    made = project(torch.ones(shape), 8)
    assert made.shape == (1, 8)
    assert bool(made.any()) == (0 not in shape)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(value):
    tensor = torch.ones(3000)
    tensor[1234] = value
    assert not bool(project(tensor, 8).isfinite().all())


def test_groups_are_only_a_matter_of_caches(monkeypatch):
    tensor = drawn(300_000, 3)
    whole, whole_print = project(tensor, 16), fingerprint(tensor)
    monkeypatch.setattr(projection, "GROUP", 8 * CHUNK)
    assert fingerprint(tensor) == whole_print
    torch.testing.assert_close(project(tensor, 16), whole, rtol=1e-13, atol=1e-10)


def test_nobody_elses_random_numbers_are_drawn():
    before = torch.get_rng_state()
    project(drawn(100, 0), 8)
    fingerprint(drawn(100, 0))
    assert torch.equal(torch.get_rng_state(), before)


FINGERPRINT = -5602373422304065782
VALUES = [
    4.2938232421875, 23.042449951171875, -58.610321044921875, -26.029754638671875,
    15.3526611328125, 41.30859375, 70.8720703125, 19.9481201171875,
]  # fmt: skip


def test_the_weights_are_the_same_in_every_version():
    """These numbers are in recorded evidence: another hash could not read it."""
    assert fingerprint(torch.arange(40, dtype=torch.float32)) == FINGERPRINT
    assert project(torch.arange(40, dtype=torch.float32), 8).flatten().tolist() == VALUES


def test_tensors_have_the_same_fingerprints_together_as_alone():
    sizes = (0, 1, 8191, 8192, 8193, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + 1)
    tensors = [drawn(size, seed, dtype) for dtype in FLOATS for seed, size in enumerate(sizes)]
    tensors += [drawn(12, 0).view(3, 4).t(), drawn(12, 0).view(3, 4)[:, ::2], torch.tensor(2.0), torch.arange(9)]
    assert fingerprints(tensors) == [fingerprint(one) for one in tensors]


def test_fingerprints_copy_few_tensors_at_once(monkeypatch):
    copies, most, reshape = weakref.WeakSet(), [], torch.Tensor.reshape

    def counted(tensor, *shape):
        copy = reshape(tensor, *shape)
        copies.add(copy)
        most.append(len(copies))
        return copy

    monkeypatch.setattr(torch.Tensor, "reshape", counted)
    fingerprints([torch.ones(GROUP // 512, 512).t() for _ in range(8)])
    assert max(most) <= 3
