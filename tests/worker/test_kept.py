"""A rank keeps a DTensor's block and its place, or that it has none. Tested in a real world of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Sharded

from plumbline.evidence.tensor_store import TensorStore
from plumbline.evidence.trace import Shard
from plumbline.worker.recorder.model_tensors import is_still, is_zero, kept
from plumbline.worker.recorder.recorder import Recorder

WHOLE = torch.arange(12.0).view(4, 3)


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this process only."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1))
    torch.distributed.destroy_process_group()


@pytest.fixture
def store(tmp_path):
    """A store that would take tensors of that size if they were not DTensors."""
    return TensorStore(str(tmp_path), 2)


@pytest.mark.parametrize("placements", [(Replicate(), Sharded(0)), (Sharded(1), Sharded(1)), (Replicate(),) * 2])
def test_a_block_is_kept_with_its_place(placements, mesh, store):
    tensor = distribute_tensor(WHOLE, mesh, placements)
    shard = kept(tensor, store)
    assert isinstance(shard, Shard)
    assert torch.equal(shard.values, WHOLE)
    assert (shard.begin, shard.shape, shard.ranks) == ((0, 0), (4, 3), (0,))
    assert is_still(tensor, shard)


def test_what_is_no_block_belongs_to_no_ranks(mesh, store):
    shard = kept(DTensor.from_local(WHOLE, mesh, [Replicate(), Partial()]), store)
    assert shard.ranks == ()


def test_what_is_kept_is_a_copy_and_another_kind_of_tensor_is_another(mesh, store):
    local = WHOLE.clone()
    tensor = DTensor.from_local(local, mesh, [Replicate(), Sharded(0)])
    shard = kept(tensor, store)
    assert not is_still(WHOLE, shard)
    assert not is_still(tensor, WHOLE)
    local += 1
    assert not is_still(tensor, shard)
    assert torch.equal(shard.values, WHOLE)


@pytest.mark.parametrize("above", [1, 100])
def test_zeros_are_zeros_however_they_are_kept(above, mesh, tmp_path):
    store = TensorStore(str(tmp_path), above)
    least = torch.tensor([0.0] * 7 + [1e-30])
    for make in (torch.clone, torch.Tensor.to_sparse, lambda tensor: distribute_tensor(tensor, mesh)):
        assert is_zero(kept(make(torch.zeros(8)), store))
        assert not is_zero(kept(make(least), store))


def hooked(**options):
    """Return a recorder, its model, and an optimizer whose steps it sees."""
    recorder, model = Recorder(), nn.Linear(3, 2)
    recorder.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), **options)
    optimizer.register_step_pre_hook(recorder.optimizer_steps.before)
    optimizer.register_step_post_hook(recorder.optimizer_steps.after)
    return recorder, model, optimizer


def test_the_step_by_which_checkpointing_makes_a_state_is_none():
    recorder, model, optimizer = hooked(lr=0.1, momentum=0.9)
    get_optimizer_state_dict(model, optimizer)
    assert "momentum_buffer" in optimizer.state[model.weight], "it has stepped"
    assert recorder.steps == []


def test_a_step_of_no_length_is_a_step_all_the_same():
    recorder, model, optimizer = hooked(lr=0.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    (step,) = recorder.steps
    assert step.learning_rates == (0.0,)
