"""Collectives over gloo, as a library that wraps them would test them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

SIZES = [pytest.param(size, marks=pytest.mark.ranks(size), id=f"{size} ranks") for size in (2, 3, 4)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("operation", "expected"),
    [(ReduceOp.SUM, sum), (ReduceOp.MAX, max), (ReduceOp.MIN, min)],
    ids=["sum", "max", "min"],
)
def test_all_reduce_combines_what_the_ranks_hold(operation, expected, size, rank):
    values = torch.tensor([rank, -rank, 1])
    dist.all_reduce(values, op=operation)
    held = [(one, -one, 1) for one in range(size)]
    assert values.tolist() == [expected(column) for column in zip(*held, strict=True)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("root", range(3))
def test_broadcast_gives_everybody_the_roots_tensor(root, rank):
    values = torch.full((4,), float(rank))
    dist.broadcast(values, src=root)
    assert torch.equal(values, torch.full((4,), float(root)))


@pytest.mark.ranks(4)
def test_gather_undoes_scatter(rank, world_size):
    whole = torch.arange(8.0).view(world_size, 2)
    part = torch.empty(2)
    dist.scatter(part, list(whole) if rank == 0 else None, src=0)
    assert torch.equal(part, whole[rank])
    parts = [torch.empty(2) for _ in range(world_size)] if rank == 0 else None
    dist.gather(part, parts, dst=0)
    if rank == 0:
        assert torch.equal(torch.stack(parts), whole)


@pytest.mark.ranks(3)
def test_a_ring_of_sends_moves_each_tensor_by_one(rank, world_size):
    mine, received = torch.tensor([rank]), torch.tensor([-1])
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    exchanges = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(exchanges):
        work.wait()
    assert received.item() == before


@pytest.mark.ranks(4)
def test_groups_reduce_apart_from_each_other(rank):
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    values = torch.tensor([rank])
    dist.all_reduce(values, group=odd if rank % 2 else even)
    assert values.item() == (4 if rank % 2 else 2)


@pytest.mark.ranks(2)
def test_works_in_flight_end_in_any_order(rank):
    tensors = [torch.full((1000,), float(rank + number)) for number in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [2 * number + 1 for number in range(5)]


@pytest.mark.ranks(2)
def test_shapes_that_differ_are_refused(rank):
    with pytest.raises(RuntimeError):
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(2))
