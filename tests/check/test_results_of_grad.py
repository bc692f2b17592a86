"""Gradients that a script computes with ``torch.autograd.grad``, and hands to the optimizer itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

from plumbline.check.verdict.verdict import Answer, answer_of

STEPS = 3

Compute = Callable[[nn.Module, list[nn.Parameter]], Sequence[Tensor]]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6), torch.randn(8, 4)


def plain(model: nn.Module, parameters: list[nn.Parameter]) -> Sequence[Tensor]:
    rows, targets = batch()
    return torch.autograd.grad(mse_loss(model(rows), targets), parameters)


def of_micro_batches(
    model: nn.Module, parameters: list[nn.Parameter], *, sums: bool = True, divides: bool = True
) -> Sequence[Tensor]:
    total: Sequence[Tensor] = [torch.zeros_like(one) for one in parameters]
    for _ in range(3):
        rows, targets = batch()
        own = torch.autograd.grad(mse_loss(model(rows), targets) / (3 if divides else 1), parameters)
        total = [one + other for one, other in zip(total, own, strict=True)] if sums else own
    return total


def of_adapted_weights(model: nn.Module, parameters: list[nn.Parameter], *, create_graph: bool) -> Sequence[Tensor]:
    """As in MAML, with or without its second order."""
    rows, targets = batch()
    inner = torch.autograd.grad(mse_loss(model(rows), targets), parameters, create_graph=create_graph)
    names = [name for name, _ in model.named_parameters()]
    moved = {name: one - 0.1 * own for name, one, own in zip(names, parameters, inner, strict=True)}
    rows, targets = batch()
    return torch.autograd.grad(mse_loss(functional_call(model, moved, (rows,)), targets), parameters)


def projected(model: nn.Module, parameters: list[nn.Parameter]) -> Sequence[Tensor]:
    """Without the part of one task's gradient that lies along another one's, as in PCGrad."""
    rows, targets = batch()
    outputs = model(rows)
    losses = mse_loss(outputs[:, :2], targets[:, :2]), mse_loss(outputs[:, 2:], targets[:, 2:])
    one, other = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses)
    along = sum((a * b).sum() for a, b in zip(one, other, strict=True)) / sum(b.square().sum() for b in other)
    return [a + b - along * b for a, b in zip(one, other, strict=True)]


def train(compute: Compute = plain, *, divisor: float = 2, reduces: bool = True, is_sharded: bool = False) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    parameters = list(model.parameters())
    rank, half = dist.get_rank(), sum(one.numel() for one in parameters) // 2
    flat = nn.utils.parameters_to_vector(parameters).detach()
    shard = nn.Parameter(flat[rank * half : (rank + 1) * half].clone())
    optimizer = torch.optim.Adam([shard] if is_sharded else parameters, 0.01)
    torch.manual_seed(1 + rank)
    for _ in range(STEPS):
        gradient = torch.cat([one.reshape(-1) for one in compute(model, parameters)])
        if reduces:
            dist.all_reduce(gradient)
            gradient /= divisor
        if is_sharded:
            shard.grad = gradient[rank * half : (rank + 1) * half].clone()
            optimizer.step()
            every = [torch.empty(half) for _ in range(2)]
            dist.all_gather(every, shard.detach())
            nn.utils.vector_to_parameters(torch.cat(every), parameters)
        else:
            parts = gradient.split([one.numel() for one in parameters])
            for one, own in zip(parameters, parts, strict=True):
                one.grad = own.view_as(one)
            optimizer.step()


def answer(plumbline: Any, *arguments: Any, **options: Any) -> str:
    (one,) = plumbline.check(lambda: train(*arguments, **options), ranks=2, steps=STEPS).trainings
    bad = [finding for finding in one.findings if finding.outcome.is_bad and finding.consequence_of is None]
    return str(bad[0].cause) if bad else answer_of(one).value


@pytest.mark.parametrize("is_sharded", [False, True])
def test_results_of_grad_are_judged(plumbline: Any, is_sharded: bool) -> None:
    assert answer(plumbline, is_sharded=is_sharded) == Answer.RIGHT.value
    assert answer(plumbline, divisor=1, is_sharded=is_sharded) == "summed-over-ranks"
    assert answer(plumbline, reduces=False, is_sharded=is_sharded) == "not-synchronised"


def test_all_micro_batches_count_whose_losses_are_divided_by_their_number(plumbline: Any) -> None:
    assert answer(plumbline, of_micro_batches) == Answer.RIGHT.value
    assert answer(plumbline, partial(of_micro_batches, sums=False)) == "only-last-micro-batch"
    assert answer(plumbline, partial(of_micro_batches, sums=False, divides=False)) == Answer.RIGHT.value


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_an_inner_step_do_not_count(plumbline: Any, create_graph: bool) -> None:
    compute = partial(of_adapted_weights, create_graph=create_graph)
    assert answer(plumbline, compute) == Answer.RIGHT.value
    assert answer(plumbline, compute, divisor=1) == "summed-over-ranks"


def test_what_a_script_combines_in_its_own_way_is_not_judged(plumbline: Any) -> None:
    assert answer(plumbline, projected) == Answer.NOT_JUDGED.value
