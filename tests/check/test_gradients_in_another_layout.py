"""DTensors whose gradients have another layout than they: torch leaves partial sums in ``.grad``."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module
from torch.nn.functional import cross_entropy

from plumbline.check.function import check_function

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=False),
}


def train(make, keeps_own=False):
    """Train a replicated model on divided rows; ``keeps_own``: each rank steps with its own sum."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = distribute_module(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), mesh)
    optimizer = make(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        inputs = DTensor.from_local(torch.randn(4, 6), mesh, [Shard(0)])
        targets = DTensor.from_local(torch.randint(3, (4,)), mesh, [Shard(0)])
        cross_entropy(model(inputs), targets).backward()
        assert all(one.grad.placements == (Partial(),) for one in model.parameters())
        if keeps_own:
            for one in model.parameters():
                one.grad = DTensor.from_local(one.grad.to_local(), mesh, one.placements, run_check=False)
        optimizer.step()
        optimizer.zero_grad()
    return [one.to_local().detach().sum().item() for one in model.parameters()]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_sum_that_the_optimizers_own_operations_add_up_is_right(make):
    check_function(lambda: train(make), 2, steps=3).assert_right(require_full=True)


def test_a_sum_that_nobody_adds_up_is_wrong():
    checked = check_function(lambda: train(OPTIMIZERS["sgd"], keeps_own=True), 2, steps=3)
    assert [one.cause for one in checked.findings if one.outcome.is_bad and one.check == "gradients"] == [
        "not-synchronised"
    ]
