"""Which parameter each of an optimizer's copies belongs to, if values alone do not show it."""

from __future__ import annotations

import pytest
import torch

from plumbline.recording.master_weights import likely_pieces, pieces_of


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


def test_views_of_parameters_are_told_by_where_they_lie_even_in_one_memory_with_others() -> None:
    memory = torch.zeros(40)
    model = [memory[:12].view(3, 4), memory[12:20], memory[20:40].view(4, 5)]
    masters = [memory[4:12], memory[12:20], memory[20:23]]
    found = pieces_of(model, masters)
    assert [(one.parameter is own, one.start, one.length) for one, own in zip(found, model, strict=True)] == [
        (True, 4, 8), (True, 0, 8), (True, 0, 3),
    ]  # fmt: skip
    assert not any(one.is_stale for one in found)


def test_what_lies_in_two_parameters_is_no_view_of_one() -> None:
    memory = torch.randn(20)
    model = [memory[:12].view(3, 4), memory[12:20]]
    found = pieces_of(model, [memory[8:16]])
    assert [(one.start, one.length) for one in found] == [(8, 4), (0, 4)]
