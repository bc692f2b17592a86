"""`plumbline check` on losses over all ranks' outputs, gathered with and without gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from plumbline.check.function import check_function
from plumbline.check.judge.noted import HeadlineNote

WORLD, ROWS, WIDTH = 2, 6, 8
SAID = "The loss uses outputs of other ranks that torch.distributed.all_gather"

Gather = Callable[[Tensor], Tensor]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ours, self.theirs = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.ours(rows)), functional.normalize(self.theirs(rows))


def constant(rows: Tensor) -> Tensor:
    every = [torch.empty_like(rows) for _ in range(WORLD)]
    dist.all_gather(every, rows.contiguous())
    return torch.cat(every)


def own_inserted(rows: Tensor) -> Tensor:
    every = [torch.empty_like(rows) for _ in range(WORLD)]
    dist.all_gather(every, rows.contiguous())
    every[dist.get_rank()] = rows
    return torch.cat(every)


def normalised_later(rows: Tensor) -> Tensor:
    return functional.normalize(constant(2 * rows))


def meant(rows: Tensor) -> Tensor:
    with torch.no_grad():
        return constant(rows)


def printed(rows: Tensor) -> Tensor:
    constant(rows).sum().item()
    return rows


def with_gradient(rows: Tensor) -> Tensor:
    return torch.cat(with_gradients.all_gather(rows))


def train(gather: Gather, *, scaled: bool = False, is_half: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rank, losses = dist.get_rank(), []
    for step in range(2):
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            ours, theirs = model(rows)
            every = gather(theirs)
            logits = (5.0 * every @ ours.T if scaled else every @ ours.T * 5.0).T
        place = torch.arange(ROWS) + (rank * ROWS if len(every) > ROWS else 0)
        loss = functional.cross_entropy(logits.float(), place)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def passed_on(rows: Tensor) -> Tensor:
    """Return own rows and the neighbour's, as in ring attention."""
    received = torch.empty_like(rows)
    sent, to = rows.contiguous(), 1 - dist.get_rank()
    for one in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, to)]):
        one.wait()
    return torch.cat([rows, received])


def passed_on_with_gradient(rows: Tensor) -> Tensor:
    return torch.cat([rows, PassedOn.apply(rows)])  # type: ignore[no-untyped-call]


class PassedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        return passed_on(rows)[len(rows) :]

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return passed_on(gradient)[len(gradient) :]


def exchanged_flat(rows: Tensor) -> Tensor:
    received = torch.empty(rows.numel())
    dist.all_to_all_single(received, rows.reshape(-1))
    return received.view_as(rows)


def detached(rows: Tensor) -> Tensor:
    return constant(rows).detach()


def measured(rows: Tensor) -> Tensor:
    """Return own rows, with columns sorted by the means over all ranks' rows."""
    return rows[:, constant(rows).mean(0).argsort()]


class Attention(nn.Module):
    """Rows attend to all ranks' rows."""

    def __init__(self, gather: Gather) -> None:
        super().__init__()
        self.ours, self.theirs, self.gather = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), gather

    def forward(self, rows: Tensor) -> Tensor:
        theirs = self.theirs(rows)
        every = self.gather(theirs)
        return theirs + (self.ours(rows) @ every.T).softmax(-1) @ every


def attend(gather: Gather) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Attention(gather))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        functional.mse_loss(model(rows), rows).backward()
        optimizer.step()
    return []


def without_modules() -> list[float]:
    """Train a bare weight in a checkpoint, and fail if that runs more than twice a step."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    optimizer, ran = torch.optim.SGD([weight], 0.1), []

    def project(rows: Tensor) -> Tensor:
        ran.append(len(rows))
        return functional.linear(rows, weight)

    for step in range(2):
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        ours: Tensor = checkpoint(project, rows, use_reentrant=False)  # type: ignore[assignment]
        functional.cross_entropy(ours.square() @ constant(ours).T, torch.arange(ROWS)).backward()
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        weight.grad /= WORLD
        optimizer.step()
        optimizer.zero_grad()
        assert len(ran) == 2 * (step + 1), ran
    return []


def notes(training: Callable[[], list[float]]) -> list[str]:
    checked = check_function(training, WORLD, steps=2)
    assert not any(end.has_failed for end in checked.ends), checked.ends
    return [one.message for one in checked.findings if isinstance(one, HeadlineNote)]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("gather", [constant, own_inserted, normalised_later])
def test_a_loss_over_outputs_that_were_gathered_as_constants_has_a_note(gather: Gather, scaled: bool) -> None:
    (note,) = notes(partial(train, gather, scaled=scaled))
    assert note.startswith(SAID)


def test_a_loss_over_outputs_that_a_neighbour_sent_has_a_note() -> None:
    (note,) = notes(partial(train, passed_on))
    assert note.startswith("The loss uses outputs of other ranks that torch.distributed.batch_isend_irecv returned")


@pytest.mark.parametrize("gather", [constant, own_inserted, normalised_later, passed_on, exchanged_flat])
def test_a_forward_that_gathers_constants_has_a_note(gather: Gather) -> None:
    (note,) = notes(partial(attend, gather))
    assert note.startswith("The forward uses outputs of other ranks that a collective, such as")


@pytest.mark.parametrize("gather", [meant, printed, with_gradient, detached, measured])
def test_a_forward_that_means_its_constants_or_does_not_use_them_has_none(gather: Gather) -> None:
    assert not notes(partial(attend, gather))


def test_outputs_that_autocast_rounds_are_found() -> None:
    (note,) = notes(partial(train, constant, is_half=True))
    assert note.startswith(SAID)


@pytest.mark.parametrize("gather", [meant, printed, with_gradient, passed_on_with_gradient])
def test_constants_that_are_meant_or_not_used_have_none(gather: Gather) -> None:
    assert not notes(partial(train, gather))


def reduced_in_place(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def only_printed(values: Tensor) -> Tensor:
    dist.all_reduce(values.clone())
    return values


def correlated(reduce: Gather) -> list[float]:
    """Train for features that are uncorrelated over the batches of all ranks, as Barlow Twins does."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        rows = model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())))
        optimizer.zero_grad()
        (reduce(rows.T @ rows / (WORLD * ROWS)) - torch.eye(WIDTH)).square().sum().backward()
        optimizer.step()
    return []


@pytest.mark.parametrize("reduce", [reduced_in_place, only_printed, with_gradients.all_reduce])
def test_a_loss_over_what_is_reduced_in_place_has_a_note(reduce: Gather) -> None:
    checked = check_function(partial(correlated, reduce), WORLD, steps=2)
    said = [one for one in checked.findings if one.message.startswith("the loss uses a tensor that torch.distributed")]
    assert len(said) == (reduce is reduced_in_place)
    checked.assert_right(require_full=True)


def printed_before_the_backward(loss: Tensor) -> Tensor:
    dist.all_reduce(loss)
    return loss


def averaged(loss: Tensor) -> Tensor:
    dist.all_reduce(loss)
    return loss / WORLD


def averaged_copy(loss: Tensor) -> Tensor:
    averaged(loss.detach().clone())
    return loss


def half_of_what_is_printed(loss: Tensor) -> Tensor:
    return printed_before_the_backward(loss / 2)


def classify(reduce: Gather) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        reduce(functional.cross_entropy(model(rows), torch.arange(ROWS))).backward()
        optimizer.step()
    return []


@pytest.mark.parametrize(
    "reduce", [averaged, averaged_copy, printed_before_the_backward, half_of_what_is_printed, with_gradients.all_reduce]
)
def test_a_loss_that_is_averaged_in_place_before_the_backward_has_a_note(reduce: Gather) -> None:
    said = [one for one in notes(partial(classify, reduce)) if one.startswith("The script adds up the loss over ranks")]
    assert len(said) == (reduce is averaged)


def test_what_a_checkpoint_keeps_is_not_computed_again() -> None:
    notes(without_modules)


def summed(gather: Gather) -> list[float]:
    """Sum gradients over ranks that each compute the loss of all outputs, which gives this loss's gradient."""
    torch.manual_seed(0)
    weight = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(weight.parameters(), 0.1)
    for step in range(2):
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        every = gather(weight(rows))
        functional.cross_entropy(every @ every.T, torch.arange(len(every))).backward()
        for one in weight.parameters():
            assert one.grad is not None
            dist.all_reduce(one.grad)
        optimizer.step()
        optimizer.zero_grad()
    return []


def own_inserted_without_gradients(rows: Tensor) -> Tensor:
    every = meant(rows).split(ROWS)
    return torch.cat([rows if rank == dist.get_rank() else every[rank] for rank in range(WORLD)])


@pytest.mark.parametrize("gather", [own_inserted, own_inserted_without_gradients, with_gradient])
def test_a_sum_over_ranks_is_accused_only_if_nothing_is_gathered_as_constants(gather: Gather) -> None:
    found = [one.cause for one in check_function(partial(summed, gather), WORLD, steps=2).findings if one.cause]
    assert found == ["summed-over-ranks"] * (gather is with_gradient)
