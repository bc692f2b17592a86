"""Large tensors are written once for all ranks with equal ones, and read back unchanged."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plumbline.core.errors import TraceError
from plumbline.evidence.read import read_rank, read_trace
from plumbline.evidence.tensor_store import FOLDER, TensorStore, load
from plumbline.evidence.trace import RankTrace, StoredTensor
from plumbline.evidence.trace_file import flatten, write_rank
from plumbline.worker.recorder.model_tensors import is_still, kept
from plumbline.worker.recorder.recorder import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")  # the tensors are small

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def store(tmp_path):
    return TensorStore(str(tmp_path / FOLDER), 16)


@settings(deadline=None, max_examples=30)
@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=3), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 99)
)
def test_what_is_kept_is_loaded_bit_for_bit(tmp_path_factory, shape, dtype, seed):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).mT
    folder = str(tmp_path_factory.mktemp("store"))
    again = load(folder, TensorStore(folder, 0).keep(tensor))
    assert again.dtype == dtype
    assert torch.equal(again, tensor)


def test_equal_tensors_of_all_ranks_lie_there_once(store):
    tensor = torch.randn(100)
    other = TensorStore(store.folder, 16)
    assert store.keep(tensor) == other.keep(tensor.clone()) == store.keep(tensor) != other.keep(tensor + 1)
    assert sum(file.stat().st_size for file in os.scandir(store.folder)) == 2 * 400


def test_tensors_of_several_shapes_and_types_are_not_mixed_up(store):
    zeros = [torch.zeros(20), torch.zeros(40), torch.zeros(4, 5), torch.zeros(20, dtype=torch.float64)]
    for tensor, stored in [(tensor, store.keep(tensor)) for tensor in zeros]:
        again = load(store.folder, stored)
        assert (again.shape, again.dtype) == (tensor.shape, tensor.dtype)


def test_small_tensors_and_integers_are_copied(store):
    for tensor in (torch.ones(16), torch.arange(40)):
        copy = kept(tensor, store)
        assert is_still(tensor, copy)
        tensor += 1
        assert not is_still(tensor, copy)
    assert not os.path.exists(store.folder)


def test_ranks_that_agree_share_a_tensor_and_one_that_differs_has_its_own(tmp_path):
    model = nn.Linear(20, 10)
    for rank in range(3):
        recorder = Recorder(TensorStore(str(tmp_path / FOLDER), 16))
        recorder.watch(model)
        with torch.no_grad():
            model.weight[3, 4] += 1e-7 if rank == 2 else 0
        write_rank(str(tmp_path / f"rank-{rank}.safetensors"), recorder.trace(rank))
    assert isinstance(read_rank(tmp_path / "rank-0.safetensors").final["weight"], StoredTensor)
    first, second, third = (rank.final for rank in read_trace(tmp_path).ranks)
    assert first["weight"] is second["weight"]
    assert not torch.equal(first["weight"], third["weight"])
    assert torch.equal(third["weight"], model.weight)
    assert all(torch.equal(rank["bias"], model.bias) for rank in (first, second, third))
    assert list(first) == ["bias", "weight"]  # ties are broken by the order in the file


def test_the_recorder_notices_what_stands_still(store):
    model = nn.Linear(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(store)
    recorder.watch(model)
    for move in (0.0, 0.0, 1e-7):
        with torch.no_grad():
            model.weight[3, 4] += move
        model(torch.ones(3, 20)).sum().backward()
        recorder.optimizer_steps.before(optimizer, (), {})
        optimizer.step()
        recorder.optimizer_steps.after(optimizer, (), {})
    first, second, third = recorder.steps
    assert second.before is first.after
    assert third.before is not second.after
    assert third.before["weight"] != second.after["weight"]


def remove(file):
    file.unlink()


def cut(file):
    os.truncate(file, 10)


def change(file):
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [remove, cut, change])
def test_a_store_that_is_not_whole_is_refused(damage, store, tmp_path):
    stored = store.keep(torch.randn(100))
    (file,) = (tmp_path / FOLDER).iterdir()
    damage(file)
    with pytest.raises(TraceError, match=rf"{file.name} is missing or damaged .*; run the cell again"):
        load(store.folder, stored)


@pytest.mark.parametrize(
    "reference",
    [
        [1, [100], "../../float32"], [1, [100], "int64"], [1, [100], "nn"], [1, [100], []], [1, [-1, -100], "float32"],
        [1, [10**30], "float32"], [1, [3] * 300, "float32"], [1, [], "float32"], [1, [0], "float32"], [1, [None], "nn"],
        ["", [1], "float32"], [1, 1, "float32"], [1], None,
    ],
)  # fmt: skip
def test_a_reference_that_cannot_be_right_is_refused(reference, store, tmp_path, monkeypatch):
    store.keep(torch.randn(100))
    (tmp_path / FOLDER / "0000000000000001--float32").write_bytes(bytes(4))
    (tmp_path / FOLDER / "0000000000000001-0-float32").write_bytes(b"")
    rank = flatten(RankTrace(0, 1, ()))[0] | {"final": "own", "stored": {"0/final/weight": reference}}
    monkeypatch.setattr("plumbline.evidence.trace_file.flatten", lambda trace: (rank, {}))
    write_rank(str(tmp_path / "rank-0.safetensors"), RankTrace(0, 1, ()))
    (tmp_path / "rank-0.log").touch()
    with pytest.raises(TraceError, match=r"is missing or damaged|is not a complete trace"):
        read_trace(tmp_path)


def test_a_store_that_cannot_be_written_disturbs_no_training_and_leaves_no_evidence(tmp_path):
    (tmp_path / FOLDER).write_text("a file in the place of the folder")
    model = nn.Linear(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(TensorStore(str(tmp_path / FOLDER), 16))
    recorder.watch(model)
    model(torch.ones(3, 20)).sum().backward()
    recorder.optimizer_steps.before(optimizer, (), {})
    optimizer.step()
    recorder.optimizer_steps.after(optimizer, (), {})
    with pytest.raises(OSError, match=FOLDER):
        recorder.trace(0)
