"""Digests of several tensors are those of each alone, are computed once at one moment, and samples reach every row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.check.rank import tensor_digest as digests
from plumbline.check.rank.tensor_digest import sampled, tensor_digest, tensor_digests, unchanged, weights_prints


def test_tensors_have_the_same_digests_together_as_alone():
    torch.manual_seed(0)
    tensors = [torch.randn(size).to(dtype) for dtype in (torch.float32, torch.bfloat16) for size in (0, 5, 1024, 9000)]
    tensors += [torch.arange(2000), torch.randn(2000, dtype=torch.complex64), torch.empty(2000, device="meta")]
    assert tensor_digests(tensors) == [tensor_digest(one) for one in tensors]
    assert tensor_digests(tensors)[-1] is None


def test_a_fingerprint_is_computed_once_at_one_moment_and_anew_at_the_next(monkeypatch):
    read: list[int] = []
    compute = digests.fingerprints
    monkeypatch.setattr(digests, "fingerprints", lambda tensors: read.extend(map(len, tensors)) or compute(tensors))
    weights, other = torch.ones(5000), torch.ones(3000)
    with unchanged():
        first, digest = weights_prints([weights, other]), tensor_digest(weights)
        assert weights_prints([other, weights]) == first[::-1]
    assert read == [5000, 3000]
    weights.data[7] = 2
    with unchanged():
        assert weights_prints([weights])[0] != first[0]
        assert tensor_digest(weights) != digest
    assert weights_prints([other]) == first[1:]


@given(rows=st.integers(1, 300), columns=st.integers(1, 50), most=st.integers(50, 2000))
def test_a_sample_is_small_and_reaches_every_row(rows, columns, most):
    places = torch.arange(rows * columns).view(rows, columns)
    found = sampled(places, most)
    assert found.numel() <= most or rows * columns <= most
    if columns >= -(-rows * columns // most) | 1:
        assert {int(one) // columns for one in found.view(-1)} == set(range(rows))


@pytest.mark.parametrize("change", ["reset", "one row", "scaled"])
def test_a_changed_state_shows_in_a_sample(change):
    state = torch.rand(512, 300) + 1
    before = sampled(state, 2**13).clone()
    if change == "reset":
        state.zero_()
    elif change == "one row":
        state[123].zero_()
    else:
        state.mul_(0.5)
    assert not torch.equal(sampled(state, 2**13), before)
