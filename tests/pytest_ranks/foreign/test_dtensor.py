"""DTensor, tensor parallelism, FSDP2 and sharded checkpoints, as a library on top of them would test them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@pytest.fixture
def mesh(rank, world_size):
    """A one-dimensional mesh of all ranks; it is created on each rank, in the process group."""
    return init_device_mesh("cpu", (world_size,))


@pytest.fixture
def weights():
    return torch.arange(48, dtype=torch.float64).view(8, 6)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_distributed_tensor_is_whole_again(placement, weights, mesh):
    distributed = distribute_tensor(weights, mesh, [placement])
    assert torch.equal(distributed.full_tensor(), weights)


@pytest.mark.ranks(2)
def test_rows_become_columns(weights, mesh, rank):
    rows = distribute_tensor(weights, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.to_local(), weights.chunk(2, dim=1)[rank])


@pytest.mark.ranks(4)
def test_a_product_of_shards_is_the_product(weights, mesh):
    left, right = distribute_tensor(weights, mesh, [Shard(1)]), distribute_tensor(weights.T, mesh, [Shard(0)])
    assert torch.equal((left @ right).full_tensor(), weights @ weights.T)


@pytest.mark.ranks(4)
def test_a_mesh_of_two_dimensions_has_its_own_groups(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    assert [mesh["data"].get_local_rank(), mesh["model"].get_local_rank()] == [rank // 2, rank % 2]


@pytest.mark.ranks(2)
def test_a_tensor_parallel_layer_computes_what_the_whole_one_does(mesh):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).double()
    inputs = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    expected = model(inputs)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(model(inputs), expected)


@pytest.mark.ranks(2)
def test_fully_sharded_gradients_are_those_of_one_process(mesh, rank):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no FSDP2")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).double()
    inputs = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    (expected,) = torch.autograd.grad(model(inputs).pow(2).mean(), model.weight)
    fsdp.fully_shard(model, mesh=mesh)
    model(inputs.chunk(2)[rank]).pow(2).mean().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected)


@pytest.mark.ranks(2)
def test_shards_are_saved_by_all_and_read_by_all(weights, mesh, tmp_path):
    checkpoint.save({"weights": distribute_tensor(weights, mesh, [Shard(0)])}, checkpoint_id=str(tmp_path / "saved"))
    other = {"weights": distribute_tensor(torch.zeros_like(weights), mesh, [Shard(1)])}
    checkpoint.load(other, checkpoint_id=str(tmp_path / "saved"))
    assert torch.equal(other["weights"].full_tensor(), weights)
