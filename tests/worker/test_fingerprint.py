"""A fingerprint tells any two tensors apart, and is the same everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.evidence import scratch_memory
from harness.evidence.fingerprint import fingerprint

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def drawn(size, seed, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """The tensors are small."""


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3000), st.integers(0, 10_000), st.sampled_from(FLOATS), st.data())
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
    wider = torch.zeros(20, 31)
    wider[:, 1:] = matrix
    assert fingerprint(wider[:, 1:]) == fingerprint(matrix)


def test_groups_are_only_a_matter_of_caches(monkeypatch):
    tensor = drawn(300_000, 3)
    whole = fingerprint(tensor)
    monkeypatch.setattr(scratch_memory, "GROUP", 8 * 1024)
    assert fingerprint(tensor) == whole


def test_it_is_the_same_in_every_version():
    """Ranks of several versions write to one store, and recorded evidence is verified with it."""
    assert fingerprint(torch.arange(40, dtype=torch.float32)) == -5602373422304065782
