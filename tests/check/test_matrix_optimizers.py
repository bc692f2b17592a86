"""Updates of optimizers of whole matrices, sharded or divided over ranks: right ones are judged, mistakes named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrix_optimizers import (
    ByRow,
    Divided,
    Gathered,
    LocalLion,
    OnShards,
    Shampoo,
    Soap,
    Stacked,
    ddp,
    in_parts,
    perceptron,
    sharded,
    training,
)
from torch.optim.optimizer import Optimizer

from plumbline.check.function import check_function
from plumbline.check.judge.replayed_updates import ADDED_UP, ALIKE, AT_TIMES, BY_PLACE, BY_TURNS, OF_ALL, NearReplay
from plumbline.check.rank import memory_needed, store_exchange
from plumbline.check.verdict.verdict import Answer, answer_of, sentence_on
from plumbline.core.finding import Finding

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")

SIZES = (12, 24, 8)
EQUAL = (16, 16, 16, 16)


def wrong(train: Callable[[], None]) -> list[Finding]:
    (training,) = check_function(train, 2, steps=2).trainings
    return [one for one in training.findings if one.outcome.is_bad]


@pytest.mark.parametrize(
    ("make", "wrap", "sizes"),
    [
        (lambda p: torch.optim.Muon(p, lr=0.02), sharded, SIZES),
        (lambda p: Soap(p, every=2), sharded, (8, 8)),
        (Divided, ddp, SIZES),
        (Gathered, ddp, EQUAL),
        (Stacked, ddp, EQUAL),
        (Shampoo, ddp, SIZES),
        (LocalLion, sharded, SIZES),
        (ByRow, ddp, SIZES),
    ],
)  # fmt: skip
def test_the_whole_update_of_a_right_optimizer_is_judged(make, wrap, sizes):
    check_function(training(make, wrap, sizes=sizes), 2, steps=2).assert_right(require_full=True)


def test_muon_on_tensor_parallel_shards_is_judged():
    train = training(torch.optim.Muon, in_parts, sizes=(8, 16, 8, 4), same=2)
    check_function(train, 4, steps=2).assert_right(require_full=True)


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ("nobody", "not-stepped-on-any-rank"),
        ("all-sum", "updates-summed"),
        ("anew", "state-begun-anew"),
        ("averaged", "scaled-update"),
        ("decay-lost", "weight-decay-lost"),
        ("decay-twice", "weight-decay-doubled"),
    ],
)
def test_a_mistake_in_dividing_matrices_over_ranks_is_named(mistake, cause):
    found = wrong(training(lambda p: Divided(p, mistake=mistake), ddp, sizes=EQUAL))
    assert [(one.check, one.cause) for one in found] == [("update", cause)], found


@pytest.mark.parametrize(("mistake", "cause"), [("by-shard", "stepped-shard-by-shard"), ("shape", "scaled-update")])
def test_a_matrix_that_is_taken_by_shards_is_named(mistake, cause):
    found = wrong(training(lambda p: OnShards(p, mistake=mistake), sharded, sizes=(8, 24)))
    assert [(one.check, one.cause) for one in found] == [("update", cause)], found


def _forgotten_on_a_rank(optimizer: Optimizer) -> None:
    if dist.get_rank() == 1:
        optimizer.state.clear()


def _forgotten_on_all_ranks(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def _exchanged(optimizer: Optimizer) -> None:
    """Each rank gets the next one's momentum."""
    for state in optimizer.state.values():
        own = state["momentum_buffer"].to_local()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        own.copy_(parts[(dist.get_rank() + 1) % len(parts)])


def _swapped(optimizer: Optimizer) -> None:
    """Two matrices of a rank swap their momentum."""
    first, second, *_ = [*optimizer.state.values()] * 2
    first["momentum"], second["momentum"] = second["momentum"], first["momentum"]


@pytest.mark.parametrize(
    ("make", "wrap", "between", "causes"),
    [
        (Divided, ddp, _forgotten_on_a_rank, ["state-begun-anew"]),
        (Divided, ddp, _forgotten_on_all_ranks, []),
        (Divided, ddp, _swapped, ["states-permuted"]),
        (torch.optim.Muon, sharded, _exchanged, ["states-permuted"]),
    ],
)  # fmt: skip
def test_a_state_that_is_not_the_last_steps_is_named(make, wrap, between, causes):
    found = wrong(training(make, wrap, sizes=EQUAL, between=between))
    assert [one.cause for one in found] == causes, found


class Clipping(Divided):
    """Clips by the norm of all matrices together, which a replay of one matrix cannot know."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        own = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([one.norm() for one in own]).norm()
        for one in own:
            one.div_(norm)
            dist.all_reduce(one)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


def test_an_update_that_depends_on_other_parameters_is_not_judged():
    (checked,) = check_function(training(Clipping, ddp), 2, steps=2).trainings
    assert not [one for one in checked.findings if one.outcome.is_bad]
    assert checked.coverage.updates.part == 0
    assert answer_of(checked) is Answer.RIGHT_IN_PART
    assert "0 % of updates" in sentence_on(checked)


class Summing(Optimizer):
    """Sums the ranks' gradients in its step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                total = p.grad.clone()
                dist.all_reduce(total)
                p.sub_(total, alpha=group["lr"])


@pytest.mark.parametrize(
    ("divisor", "says"),
    [
        (1, "summed-over-ranks"),
        pytest.param(2, "passed", marks=pytest.mark.nightly),
        pytest.param(3, ADDED_UP, marks=pytest.mark.nightly),
    ],
)
def test_a_step_that_adds_up_gradients_is_right_if_the_loss_is_divided(divisor, says):
    def train() -> None:
        model = perceptron(6, 4)
        optimizer = Summing(model.parameters())
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            (torch.nn.functional.mse_loss(model(torch.randn(8, 6)), torch.randn(8, 4)) / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()

    (checked,) = check_function(train, 2, steps=2).trainings
    (update,) = [one for one in checked.findings if one.check == "update"]
    assert says in (update.cause, update.outcome.value) or says in update.message


class InBlocksAtTimes(OnShards):
    """Like MuonBP (arXiv 2510.16981): intended blocks, and whole matrices at every second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["taken"] = 1 + group.get("taken", 0)
            self.mistake = "by-shard" if group["taken"] % 2 else ""
        super().step()


@pytest.mark.nightly
def test_a_rank_without_memory_for_whole_matrices_keeps_no_other_waiting(monkeypatch):
    def free_bytes(device: torch.device) -> int:
        return 10**9 if dist.get_rank() else 10

    monkeypatch.setattr(memory_needed, "free_bytes", free_bytes)
    monkeypatch.setattr(store_exchange, "TIMEOUT_S", 5.0)
    (checked,) = check_function(training(torch.optim.Muon, sharded, sizes=(8, 24)), 2, steps=2).trainings
    (update,) = [one for one in checked.findings if one.check == "update"]
    assert "too little memory is free on a rank" in update.message


class OneAtATime(Optimizer):
    """Steps one matrix per step, each with its own rate, as block coordinate descent may."""

    def __init__(self, params: Any, lr: float = 0.02, *, in_turn: bool = False) -> None:
        super().__init__(params, {"lr": lr, "taken": 0})
        self.in_turn = in_turn

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["taken"] += 1
            for number, p in enumerate(group["params"]):
                update = p.grad.sign() / dist.get_world_size()
                dist.all_reduce(update)
                is_due = not self.in_turn or group["taken"] % 2 != number
                p.sub_(update, alpha=group["lr"] * is_due * (1 if self.in_turn else 0.5**number))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "wrap", "why"),
    [
        (InBlocksAtTimes, sharded, BY_TURNS),
        (partial(OneAtATime, in_turn=True), ddp, AT_TIMES),
        (OneAtATime, ddp, BY_PLACE),
    ],
)
def test_what_a_class_may_mean_is_not_called_a_mistake(make, wrap, why):
    (checked,) = check_function(training(make, wrap, sizes=(8, 8, 8)), 2, steps=2).trainings
    updates = [one for one in checked.findings if one.check == "update"]
    assert not [one for one in updates if one.outcome.is_bad]
    assert any(why in one.message for one in updates)
    assert checked.coverage.updates.part < 1


class Normalised(Optimizer):
    """Divides all gradients by their common norm."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"])


def test_an_update_that_depends_on_all_parameters_is_judged_if_all_ranks_hold_the_same():
    check_function(training(Normalised, ddp), 2, steps=2).assert_right(require_full=True)

    def train() -> None:
        model = torch.nn.Linear(4, 4 + dist.get_rank())
        optimizer = Normalised(model.parameters())
        for _ in range(2):
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    (checked,) = check_function(train, 2, steps=2).trainings
    assert f"not judged: {OF_ALL}" in {one.message for one in checked.findings if one.check == "update"}


def test_rounding_that_could_hide_a_step_by_shards_leaves_no_verdict():
    others = {"by-shard": (1e-2, 1e-2), "still": (1.0, 1.0)}
    assert NearReplay(1e-7, tight=1e-7, others=others | {"by-shard": (0.2, 0.2)}).is_right
    assert not NearReplay(1e-7, tight=2e-2, others=others | {"by-shard": (0.2, 0.2)}).is_right
    assert NearReplay(0.0, tight=2e-2, others=others).is_right  # it equals the replay bit for bit


def test_an_update_near_to_no_known_mistake_is_like_none():
    others = {"by-shard": (2 * ALIKE, 1.0), "still": (1.0, 1.0)}
    assert NearReplay(1.0, tight=1e-7, others=others).mistake == ""
    assert NearReplay(1.0, tight=1e-7, others=others | {"still": (ALIKE / 2, 1.0)}).mistake == "still"


def test_a_mistake_that_is_repeated_bit_for_bit_is_named_whatever_the_rounding():
    one = NearReplay(0.5, tight=0.1, others={"by-shard": (0.0, 0.5), "still": (1.0, 1.0)})
    assert one.mistake == "by-shard"
    assert one.noise == 0
