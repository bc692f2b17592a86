"""`plumbline check` on losses that communicate, and on modules of a joint forward that rerun or are compiled."""

from __future__ import annotations

import time
import weakref
from functools import partial
from itertools import count
from typing import Any

import losses_that_communicate
import pytest
import torch
from torch import Tensor

from plumbline.check.judge.noted import HeadlineNote
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.rank.joint import exchanges
from plumbline.check.rank.joint.exchanges import Exchanged, ExchangeFunctions
from plumbline.check.rank.store_exchange import TIMEOUT_S
from plumbline.check.verdict.verdict import Answer, answer_of
from plumbline.replay.nested import map_tensors
from plumbline.replay.random_state import RandomState

RIGHT = (
    "contrast", "contrast-of-torch", "variance", "correlation", "correlation-in-place", "printed",
    "contrast inside", "contrast-of-torch inside", "correlation inside", "correlation-in-place inside",
    "printed inside", "normalised", "checkpoint", "reentrant-checkpoint", "compiled", "vocabulary", "neighbour",
)  # fmt: skip

WRONG = (
    ("contrast", "not-reduced"), ("contrast", "counted-on-each-rank"), ("neighbour", "not-sent-back"),
    ("contrast inside", "not-reduced"), ("normalised", "not-reduced"),
    ("checkpoint", "counted-on-each-rank"), ("compiled", "counted-on-each-rank"),
)  # fmt: skip


def checked(plumbline: Any, *scene: str) -> CheckedTraining:
    check = plumbline.check(partial(losses_that_communicate.run, *scene), ranks=2, steps=2)
    assert not any(end.has_failed for end in check.ends), check.ends
    training: CheckedTraining
    (training,) = check.trainings
    return training


@pytest.mark.parametrize("scene", RIGHT)
def test_all_of_a_right_training_is_judged(plumbline: Any, scene: str) -> None:
    training = checked(plumbline, scene)
    assert answer_of(training) is Answer.RIGHT, training.coverage.gradients
    assert not any(isinstance(one, HeadlineNote) for one in training.findings)


@pytest.mark.parametrize(("scene", "mistake"), WRONG)
def test_a_backward_that_exchanges_otherwise_than_its_forward_is_named(
    plumbline: Any, scene: str, mistake: str
) -> None:
    training = checked(plumbline, scene, mistake)
    bad = [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]
    assert ("gradients", "exchanged-otherwise") in {(one.check, one.cause) for one in bad}


def test_it_is_said_whose_backward_was_compared(plumbline: Any) -> None:
    messages = [one.message for one in checked(plumbline, "contrast").findings if one.check == "gradients"]
    assert any("communicates through Gathered, whose backward is the derivative" in one for one in messages)


@pytest.mark.parametrize("kind", ["given", "gathered"])
def test_ranks_that_take_part_in_different_ways_do_not_wait_for_each_other(plumbline: Any, kind: str) -> None:
    began = time.monotonic()
    check = plumbline.check(partial(losses_that_communicate.train_otherwise_on_one_rank, kind), ranks=2, steps=2)
    assert check.answer is Answer.RIGHT
    assert time.monotonic() - began < TIMEOUT_S / 2


def test_a_gathered_loss_that_counts_own_rows_only_is_noted(plumbline: Any) -> None:
    training = checked(plumbline, "variance", "not-reduced")
    assert answer_of(training) is Answer.RIGHT
    (note,) = (one for one in training.findings if isinstance(one, HeadlineNote))
    assert "Gathered, whose backward gives 1/2 of the derivative of its forward" in note.message


@pytest.mark.parametrize("scene", [("straight",), ("vocabulary", "class-on-each-rank")])
def test_a_backward_that_is_no_derivative_is_not_judged(plumbline: Any, scene: tuple[str, ...]) -> None:
    training = checked(plumbline, *scene)
    assert answer_of(training) is Answer.NOT_JUDGED
    assert any("through which the loss communicates, is not the derivative" in one.message for one in training.findings)


def test_a_loss_of_all_ranks_that_counts_once_on_each_is_not_judged(plumbline: Any) -> None:
    training = checked(plumbline, "vocabulary", "counted-on-each-rank")
    assert answer_of(training) is Answer.NOT_JUDGED
    assert any(
        "through Likelihood, whose backward is the derivative of the sum" in one.message for one in training.findings
    )


@pytest.mark.parametrize(
    ("mistake", "answer"),
    [("", Answer.RIGHT), ("bias-not-averaged", Answer.WRONG), ("counted-on-each-rank", Answer.NOT_JUDGED)],
)
def test_a_loss_of_two_ranks_counts_once_in_the_mean_over_replicas(
    plumbline: Any, mistake: str, answer: Answer
) -> None:
    check = plumbline.check(partial(losses_that_communicate.train_in_pairs, mistake), ranks=4, steps=2)
    (training,) = check.trainings
    assert answer_of(training) is answer, training.findings
    causes = {one.cause for one in training.findings if one.outcome.is_bad and not one.consequence_of}
    assert causes == ({"averaged-over-some-ranks"} if answer is Answer.WRONG else set())


@pytest.mark.parametrize("kind", ["logged", "printed", "given"])
def test_copies_that_nobody_reduces_are_found_whatever_the_ranks_know_of_each_other_s_losses(
    plumbline: Any, kind: str
) -> None:
    check = plumbline.check(partial(losses_that_communicate.train_with_an_own_head, kind), ranks=2, steps=2)
    (wrong,) = [one for one in check.findings if one.outcome.is_bad and not one.consequence_of]
    assert (wrong.check, wrong.cause) == ("gradients", "some-parameters-not-synchronised")


def test_equal_biases_of_parts_of_outputs_are_no_copies(plumbline: Any) -> None:
    training = checked(plumbline, "vocabulary-with-bias")
    assert not [one for one in training.findings if one.outcome.is_bad]
    (note,) = (one for one in training.findings if isinstance(one, HeadlineNote))
    assert note.message.startswith("1.bias starts with equal values on several ranks")


def test_what_is_added_in_place_is_said_to_be_constant(plumbline: Any) -> None:
    messages = [one.message for one in checked(plumbline, "printed inside").findings if one.check == "gradients"]
    assert any("autograd does not see" in one for one in messages)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values + torch.randn(values.shape, dtype=values.dtype)


def test_a_function_that_is_run_again_draws_its_random_numbers_and_leaves_those_of_the_script() -> None:
    values = torch.ones(3)
    call = Exchanged(Noisy, (values,), [values], 1, RandomState.now(()), lambda: None)
    before = torch.get_rng_state()
    (first,), (second,) = (call.outputs(lambda number, one: one) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_without_a_backward_pass_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[Tensor]] = []

    def noted(args: Any, change: Any) -> Any:
        made = map_tensors(args, change)
        copies.append(weakref.ref(made[0]))
        return made

    numbers = count()
    monkeypatch.setattr(exchanges, "collectives", lambda: {"world": next(numbers)})  # as if each call communicated
    monkeypatch.setattr(exchanges, "members_of_groups", lambda: {"world": [0, 1]})
    monkeypatch.setattr(exchanges, "map_tensors", noted)
    functions = ExchangeFunctions()
    functions.start()
    values = torch.ones(3, requires_grad=True)
    for _ in range(4):
        Noisy.apply(values)
    alive = [one for one in copies if one() is not None]
    functions.stop()
    assert (len(copies), len(alive)) == (4, 1)
