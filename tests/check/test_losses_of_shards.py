"""Losses that each rank computes from its own shard of a DTensor: DTensor sums their gradients over the ranks."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from plumbline.check.function import check_function
from plumbline.core.outcome import Outcome

Loss = Callable[[DTensor, DTensor], Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def steps(parameters, step) -> None:
    optimizer = torch.optim.SGD(parameters, 0.1, foreach=False)
    torch.manual_seed(1)
    for _ in range(3):
        step(torch.randn(8, 6), torch.randint(4, (8,)))
        optimizer.step()
        optimizer.zero_grad()


def train(loss: Loss) -> None:
    """Train a replicated model on rows that are divided over the ranks."""
    mesh = init_device_mesh("cpu", (2,))
    replicated = distribute_module(model(), mesh)

    def step(*batch: Tensor) -> None:
        rows, targets = (distribute_tensor(one, mesh, [Shard(0)]) for one in batch)
        loss(replicated(rows), targets).backward()

    steps(replicated.parameters(), step)


def of_own_rows(outputs: DTensor, targets: DTensor) -> Tensor:
    return cross_entropy(outputs.to_local(), targets.to_local())


def summed_over_own_rows(outputs: DTensor, targets: DTensor) -> Tensor:
    return cross_entropy(outputs.to_local(), targets.to_local(), reduction="sum") / len(outputs)


def of_all_rows(outputs: DTensor, targets: DTensor) -> Tensor:
    return cross_entropy(outputs.full_tensor(), targets.full_tensor())


RIGHT = {
    "divided": lambda *batch: of_own_rows(*batch) / 2,
    "summed over own rows": summed_over_own_rows,
    "of all rows": of_all_rows,
    "one DTensor": cross_entropy,
    "part of a DTensor": lambda *batch: cross_entropy(*batch).to_local(),
}


@pytest.mark.parametrize("loss", RIGHT.values(), ids=RIGHT)
def test_one_loss_of_all_rows_is_right_however_it_is_divided(loss):
    check_function(lambda: train(loss), 2, steps=3).assert_right(require_full=True)


def causes(checked) -> list[str]:
    return [one.cause for one in checked.findings if one.check == "gradients" and one.outcome is Outcome.FAILED]


def test_means_over_own_rows_whose_gradients_are_summed_are_wrong():
    assert causes(check_function(lambda: train(of_own_rows), 2, steps=3)) == ["summed-over-ranks"]


def train_with_plain_head(divisor: int) -> None:
    """Train DTensors and then a plain layer on the rows of each rank; the script averages the latter's gradients."""
    mesh = init_device_mesh("cpu", (2,))
    first, _, head = model()
    distribute_module(first, mesh)

    def step(*batch: Tensor) -> None:
        rows, targets = (distribute_tensor(one, mesh, [Shard(0)]) for one in batch)
        (cross_entropy(head(first(rows).to_local()), targets.to_local()) / divisor).backward()
        for one in head.parameters():
            dist.all_reduce(one.grad)
            one.grad /= 2 / divisor

    steps([*first.parameters(), *head.parameters()], step)


def test_parameters_that_are_dtensors_and_others_may_be_averaged_in_different_ways():
    check_function(lambda: train_with_plain_head(2), 2, steps=3).assert_right(require_full=True)


def test_a_sum_for_dtensors_beside_a_mean_for_others_is_wrong():
    assert causes(check_function(lambda: train_with_plain_head(1), 2, steps=3))


class OwnColumns(torch.autograd.Function):
    """The cross-entropy of logits whose columns are divided over the ranks."""

    @staticmethod
    def forward(context, logits, targets):
        total = logits.exp().sum(-1)
        dist.all_reduce(total)
        places = targets - dist.get_rank() * logits.shape[-1]
        own = ((places >= 0) & (places < logits.shape[-1])).to(logits.dtype)
        places = places.clamp(0, logits.shape[-1] - 1)[:, None]
        of_targets = logits.gather(-1, places)[:, 0] * own
        dist.all_reduce(of_targets)
        shares = logits.exp() / total[:, None]
        context.save_for_backward(shares.scatter_add(-1, places, -own[:, None]))
        return (total.log() - of_targets).mean()

    @staticmethod
    def backward(context, gradient):
        (shares,) = context.saved_tensors
        return gradient * shares / len(shares), None


def train_own_columns() -> None:
    """Train a layer whose outputs are divided over ranks that compute the same loss from their parts."""
    mesh = init_device_mesh("cpu", (2,))
    layer = parallelize_module(
        nn.Sequential(model()[0]), mesh, {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    )

    def step(rows: Tensor, targets: Tensor) -> None:
        OwnColumns.apply(layer(distribute_tensor(rows, mesh, [Replicate()])).to_local(), targets).backward()

    steps(layer.parameters(), step)


def test_a_loss_that_ranks_compute_together_from_their_columns_is_right():
    check_function(train_own_columns, 2, steps=3).assert_right(require_full=True)


def train_sequence_parts_under_fsdp2() -> None:
    """Train layers that FSDP2 shards over rows, and whose outputs are divided over two ranks along the sequence."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "sequence"))
    net = model()
    plan = {"2": ColwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    parallelize_module(net, mesh["sequence"], plan)
    fully_shard(net, mesh=mesh["rows"])
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
    torch.manual_seed(mesh.get_local_rank("rows"))
    for _ in range(3):
        (net(torch.randn(2, 8, 6)).to_local().square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_parts_of_sequences_under_fsdp2_are_right_if_their_mean_is_divided():
    checked = check_function(train_sequence_parts_under_fsdp2, 4, steps=3)
    assert not [one for one in checked.findings if one.outcome is Outcome.FAILED]
