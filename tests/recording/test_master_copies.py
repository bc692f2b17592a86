"""Which parameter each copy is of that an optimizer holds, where values alone do not say so."""

from __future__ import annotations

import pytest
import torch

from plumbline.recording.master_weights import likely_pieces


def weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(2, 3), torch.zeros(2), torch.ones(2), torch.zeros(2), torch.randn(2, 2), torch.randn(2)]
    return [one.bfloat16() for one in made]


@pytest.mark.parametrize(
    "order",
    [
        [0, 1, 2, 3, 4, 5],
        [5, 4, 3, 2, 1, 0],
        [0, 4, 1, 2, 3, 5],  # matrices first
        [4, 0, 5, 3, 2, 1],  # the same in reverse
    ],
)
def test_equal_values_tell_copies_apart_and_the_order_of_the_others_the_rest(order: list[int]) -> None:
    model = weights()
    masters = [model[number].float() for number in order]
    found = {id(one.master): one.parameter for one in likely_pieces(model, masters)}
    assert all(found[id(one)] is model[number] for one, number in zip(masters, order, strict=True))


def test_copies_of_other_values_are_those_of_their_shapes() -> None:
    model = weights()
    masters = [3 * one.float() + 5 for one in model]
    assert [one.parameter is own for one, own in zip(likely_pieces(model, masters), model, strict=True)] == [True] * 6
    assert likely_pieces(model, [torch.zeros(7)]) == []
