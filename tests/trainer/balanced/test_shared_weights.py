"""Gradients of weights on several stages, and of replicas, are summed for all sizes and dtypes."""

from __future__ import annotations

import torch

from plumbline.ranks import run_on_ranks
from plumbline.trainer.balanced import shared_weights

RANKS = 3
SHAPES = [(), (3,), (0,), (400, 200), (7, 5), (300, 300), (2,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def gradients(rank):
    """Return integers, so that sums are exact; every fourth weight has a gradient on one rank, every fifth none."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number, (shape, dtype) in enumerate((shape, dtype) for shape in SHAPES for dtype in DTYPES):
        gradient = torch.randint(-9, 9, shape, generator=generator).to(dtype)
        missing = number % 5 == 4 or (number % 4 == 3 and rank != 1)
        found.append(None if missing else gradient.t() if gradient.dim() == 2 else gradient)  # not contiguous
    return found


def summed(terminal):
    weights = [torch.zeros(tuple(reversed(shape)), dtype=dtype) for shape in SHAPES for dtype in DTYPES]
    for weight, gradient in zip(weights, gradients(terminal.rank), strict=True):
        weight.grad = gradient
    shared_weights.sum_gradients(weights, None)
    return [weight.grad for weight in weights]


def test_gradients_are_summed_and_stay_away_where_no_rank_has_one():
    own = [gradients(rank) for rank in range(RANKS)]
    for end in run_on_ranks(summed, RANKS, timeout=60, backend="gloo"):
        assert end.error is None, end.description
        for ours, of_ranks in zip(end.value, zip(*own, strict=True), strict=True):
            there = [one for one in of_ranks if one is not None]
            assert (ours is None) is (not there)
            assert ours is None or torch.equal(ours, sum(there[1:], start=there[0]))
