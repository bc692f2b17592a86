"""DistributedDataParallel, as a trainer that uses it would test it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(torch.nn.Module):
    """A body and two heads, one of which is used per call."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(2))

    def forward(self, inputs, head):
        return self.heads[head](self.body(inputs))


@pytest.fixture
def inputs():
    return torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)


@pytest.fixture
def alone(inputs):
    """A model, and its gradients over all inputs in one process; computed before ranks exist."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    model(inputs).pow(2).mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return model, gradients


@pytest.mark.ranks(4)
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 25], ids=["small buckets", "one bucket"])
@pytest.mark.parametrize("view", [True, False], ids=["views", "copies"])
def test_gradients_are_those_of_one_process(bucket_cap_mb, view, alone, inputs, rank, world_size):
    model, expected = alone
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=view)
    wrapped(inputs.chunk(world_size)[rank]).pow(2).mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.ranks(2)
def test_no_sync_leaves_gradients_to_each_rank(alone, inputs, rank):
    model, _ = alone
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        wrapped(inputs[rank : rank + 1]).sum().backward()
    gradients = [torch.empty(3, 4, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(gradients, model[0].weight.grad)
    assert not torch.equal(*gradients)


@pytest.mark.ranks(2)
def test_a_head_that_no_rank_uses_has_no_gradient():
    model = TwoHeads()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        wrapped(torch.ones(2, 4), head=1).sum().backward()
    assert model.heads[0].weight.grad is None
    assert model.heads[1].weight.grad is not None


@pytest.mark.ranks(3)
def test_ranks_with_fewer_batches_join(rank):
    wrapped = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    steps = 0
    with wrapped.join():
        for _ in range(rank + 1):
            wrapped(torch.ones(1, 1)).sum().backward()
            steps += 1
    assert steps == rank + 1


@pytest.mark.ranks(2)
def test_weights_of_rank_0_are_those_of_all(rank):
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 4)
    DistributedDataParallel(model)
    weights = [torch.empty(4, 4) for _ in range(2)]
    dist.all_gather(weights, model.weight.detach())
    assert torch.equal(*weights)
