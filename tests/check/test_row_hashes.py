"""Rows of inputs are recognised by their bits, and only by these."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plumbline.check.rank.observers.document_layout import document_ends
from plumbline.check.rank.observers.row_hashes import ROWS_KEPT, row_hashes, rows_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


def _tensor(rows: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, 3, 40, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


@given(st.integers(1, 20), st.integers(0, 100), st.sampled_from(DTYPES))
def test_a_row_has_its_hash_wherever_it_stands(rows: int, seed: int, dtype: torch.dtype) -> None:
    tensor = _tensor(rows, seed, dtype)
    order = torch.randperm(rows)
    assert row_hashes([tensor[order]]) == [row_hashes([tensor])[place] for place in order]


@given(st.integers(0, 100), st.integers(0, 119), st.sampled_from((torch.float32, torch.int64, torch.uint8)))
def test_every_entry_counts(seed: int, place: int, dtype: torch.dtype) -> None:
    tensor = _tensor(2, seed, dtype)
    other = tensor.clone()
    other.view(2, -1)[0, place] += 1
    changed, same = (a != b for a, b in zip(row_hashes([tensor]), row_hashes([other]), strict=True))
    assert changed
    assert not same


@given(st.integers(0, 100))
def test_the_order_of_entries_counts(seed: int) -> None:
    tensor = _tensor(4, seed, torch.float32)
    assert row_hashes([tensor]) != row_hashes([tensor.flip(-1)])


def test_a_transposed_tensor_has_the_hashes_of_its_values() -> None:
    tensor = torch.randn(5, 6)
    assert row_hashes([tensor.t()]) == row_hashes([tensor.t().contiguous()])


def test_tensors_of_one_length_make_up_the_rows_together() -> None:
    tokens, labels = torch.arange(12).view(3, 4), torch.tensor([0, 1, 0])
    one = rows_of((), {"tokens": tokens, "labels": labels, "positions": torch.arange(4).view(1, 4)})
    other = rows_of((), {"tokens": tokens, "labels": torch.tensor([0, 1, 1])})
    assert one is not None
    assert other is not None
    assert [a == b for a, b in zip(one["hashes"], other["hashes"], strict=True)] == [True, True, False]
    assert one["shapes"] == [[3, 4], [3]]


def test_of_a_large_batch_the_same_rows_are_kept_in_any_order() -> None:
    tensor = torch.randn(ROWS_KEPT * 3, 2)
    one, other = rows_of((tensor,), {}), rows_of((tensor.flip(0),), {})
    assert one is not None
    assert other is not None
    assert one["hashes"] == other["hashes"]
    assert len(one["hashes"]) == ROWS_KEPT
    assert one["order"] != other["order"]


def test_a_call_without_tensors_has_no_rows() -> None:
    assert rows_of((1, "a"), {"x": None}) is None


def test_documents_of_tokens_are_rows() -> None:
    tokens = torch.tensor([5, 6, 7, 5, 6, 8])

    def documents(*ends: int) -> list[int]:
        facts = rows_of((tokens,), {"cu_seqlens": torch.tensor([0, *ends])})
        assert facts is not None
        return list(facts["hashes"])

    first, _, again, _ = documents(2, 3, 5, 6)
    assert first == again
    assert len(set(documents(3, 6))) == 2
    assert len(documents(3, 5)) == 6  # the slice has other ends than this tensor


@pytest.mark.parametrize(
    "named",
    [
        {"position_ids": torch.tensor([0, 1, 2, 0, 1, 0])},
        {"document_ids": torch.tensor([0, 0, 0, 1, 1, 2])},
        {"cu_seqlens": torch.tensor([0, 3, 5, 6])},
    ],
    ids=lambda named: next(iter(named)),
)
def test_documents_of_a_stream_of_tokens_are_rows(named) -> None:
    class Model(nn.Module):
        def forward(self, input_ids, **named):
            pass

    arguments = {"input_ids": torch.tensor([5, 6, 7, 5, 6, 8]), **named}
    facts = rows_of((), arguments, lambda: document_ends(Model(), (), arguments))
    assert facts is not None
    assert facts["rows"] == 3


def test_a_stream_of_one_document_is_one_row() -> None:
    arguments = {"input_ids": torch.tensor([5, 6, 5]), "position_ids": torch.arange(3)}
    facts = rows_of((), arguments, lambda: document_ends(nn.Identity(), (), arguments))
    assert facts is not None
    assert facts["rows"] == 1
