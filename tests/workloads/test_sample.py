"""A batch of the job's data can be moved as a whole, in any of the usual ways."""

from __future__ import annotations

import copy

import torch
from torch.utils.data import DataLoader, StackDataset

from plumbline.workloads import find


def test_a_loader_s_batch_has_to():
    data = find("mlp").dataset(2)
    for batch in (next(iter(DataLoader(data, 4))), next(iter(DataLoader(StackDataset(data, data), 4)))[0]):
        assert isinstance(batch, dict)
        assert batch.to("meta", non_blocking=True) is batch  # in place: scripts do not always use the result
        assert {column.device.type for column in batch.values()} == {"meta"}


def test_moving_a_batch_leaves_the_data_where_it_is():
    data = find("mlp").dataset(2)
    data[0].to("meta")
    data.batch([0, 1]).to("meta")
    copy.copy(data[0]).to("meta")
    assert {column.device for column in data.columns.values()} == {torch.device("cpu")}
