"""The predictions of mistakes for single parameters, whose gradients are known along random directions."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.check.evidence.training import BackwardPass, Parameter, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.gradients import judge_gradients
from plumbline.check.judge.joint_gradient import JointGradient
from plumbline.check.judge.joint_truth import JointTruth
from plumbline.check.judge.wrong_together import (
    are_only_rounding,
    has_hidden_left_over,
    has_last_pass_apart,
    has_left_over,
)
from plumbline.core.outcome import Outcome
from plumbline.judge.mistakes.accumulation import PREVIOUS_STEP_NOT_ZEROED
from plumbline.judge.mistakes.synchronisation import only
from plumbline.judge.truth import Combination, GradientEvidence, SomeParameters

NOISE, LIMIT = 1e-7, 128.0


def measured(right: float, left: float, received: float) -> dict[str, Any]:
    return {
        "received": received,
        "left": left,
        "left_in_parts": 0.0,
        "shares": [[right / 2], [right / 2]],
        "noise": NOISE,
    }


NAMED = {
    "name": "weight", "ranks": [0], "right": 1.0, "again": [], "began_alike": False, "copies": 1,
    "one_gradient": False, "parts": [], "in_pieces": False, "with_all_copies": None,
}  # fmt: skip


def evidence(*right: dict[str, Any]) -> GradientEvidence[JointGradient]:
    wrong = [{**measured(1.0, 0.5, 1.5), **NAMED}]
    found = {"wrong": wrong, "right": list(right), "limit": LIMIT, "judged": [], "losses": 2}
    return GradientEvidence([JointGradient.of(1, found["wrong"][0], found, 2)])


@pytest.mark.parametrize(
    ("right", "fits"),
    [
        (measured(1e-4, 1e-6, 1.01e-4), True),  # rounding hides the rest of the step before
        (measured(1.0, 0.5, 1.0), False),
        (measured(0.0, 0.0, 0.0), True),
    ],
)
def test_a_mistake_in_all_gradients_has_to_predict_the_right_ones(right: dict[str, Any], fits: bool) -> None:
    assert (evidence(right).match(PREVIOUS_STEP_NOT_ZEROED) is not None) == fits


SHARES, OWN = [[0.3, 0.5], [0.1, 0.7]], [[0.2, 0.1], [0.05, 0.4]]


def copy_of(received: float, *, shares: list[list[float]], own: list[list[float]]) -> JointGradient:
    found = wrong_copy(received, shares=shares, own=own)
    return JointGradient.of(1, found, {"wrong": [found], "right": [], "limit": LIMIT, "judged": [], "losses": 2}, 2)


def wrong_copy(received: float, *, shares: list[list[float]] = SHARES, own: list[list[float]] = OWN) -> dict[str, Any]:
    every = {"received": received, "left": 0.0, "shares": shares, "own": own, "noise": NOISE}
    alike = {"began_alike": True, "copies": 2.0, "with_all_copies": every}
    return {**measured(1.0, 0.5, 1.5), **NAMED, **alike}


@pytest.mark.parametrize(
    ("received", "is_whole", "last_pass_is_apart"),
    [(1.6, True, False), (0.3 + 0.1 + 2 * 0.5, False, True), (2 * 0.75, False, False), (0.0, False, False)],
)
def test_what_a_copy_received_is_told_from_what_all_copies_should(
    received: float, *, is_whole: bool, last_pass_is_apart: bool
) -> None:
    case = copy_of(received, shares=SHARES, own=OWN)
    assert (case.is_whole, has_last_pass_apart([case])) == (is_whole, last_pass_is_apart)


def test_a_copy_counts_as_whole_only_where_its_own_gradient_would_be_another() -> None:
    assert not copy_of(1.6, shares=SHARES, own=[[0.3, 0.1], [0.1, 0.3]]).is_whole


def test_right_gradients_that_can_be_seen_refute_a_mistake_in_all() -> None:
    (own,) = evidence(measured(1.0, 0.0, 1.0)).wrong
    assert min(own.misfits(Combination(only({0}, 3.0)))) == float("inf")
    assert min(own.misfits(SomeParameters(Combination(only({0}, 3.0))))) == 0


def coarse(random: Random, count: int, *, left: float, right: float = 100.0) -> list[dict[str, Any]]:
    """Return directions with errors below 16 × noise: a rest of about 8 × noise, times ``left``, and rounding."""
    directions = []
    for _ in range(count):
        value, rest = random.gauss(0.0, right), random.gauss(0.0, 8.0)
        received = value + left * rest + random.gauss(0.0, 0.5)
        directions.append({"received": received, "left": rest, "left_in_parts": 0.0, "shares": [[value]], "noise": 1.0})
    return directions


@pytest.mark.parametrize(("left", "is_seen"), [(1.0, True), (0.0, False), (0.5, False)])
@given(seed=st.integers(0, 10**6))
def test_many_directions_show_what_is_left_below_the_noise_of_each(left: float, *, is_seen: bool, seed: int) -> None:
    directions = coarse(Random(seed), 40, left=left)
    assert has_hidden_left_over(directions, 2) == is_seen
    assert not has_hidden_left_over(directions[:3], 2)


@given(seed=st.integers(0, 10**6), factor=st.sampled_from([2.0, 0.5]))
def test_what_is_left_in_parts_is_summed_or_divided_again(seed: int, factor: float) -> None:
    random = Random(seed)
    directions = coarse(random, 40, left=1.0)
    for one in directions:
        one["left_in_parts"] = random.gauss(0.0, 8.0)
        one["received"] += (factor - 1) * one["left_in_parts"]
    assert has_hidden_left_over(directions, 2)


def test_an_error_in_the_size_of_all_gradients_is_not_what_is_left_of_equal_ones() -> None:
    random = Random(0)
    values = [random.gauss(0.0, 100.0) for _ in range(20)]
    same = [
        {"received": 1.05 * one, "left": 0.05 * one, "left_in_parts": 0.0, "shares": [[one]], "noise": 1.0}
        for one in values
    ]
    assert not has_hidden_left_over(same, 2)


def test_a_training_is_wrong_whose_errors_are_below_the_limit_but_equal_to_what_is_left() -> None:
    found = JointTruth(recorded(COMPARED | {"limit": 16.0, "right": coarse(Random(0), 20, left=1.0)})).compare()
    assert (found.outcome, found.cause) == (Outcome.FAILED, "previous-step-not-zeroed")


@pytest.mark.parametrize(
    ("factors", "explains"),
    [([1.0, 1.0, 0.5, 0.5], True), ([1.0, 0.5, 0.5, 0.5], False), ([1.0, 1.0, 0.5, 0.3], False)],
)
def test_what_is_left_is_averaged_in_replicas_and_divided_again_in_parts(
    factors: list[float], *, explains: bool
) -> None:
    random = Random(0)
    wrong = []
    for index, factor in enumerate(factors):
        right, left = random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)
        facts = measured(right, left, right + factor * left) | {"left_in_parts": left if index > 1 else 0.0}
        wrong.append(replace(evidence().wrong[0], **facts))
    assert has_left_over(wrong) == explains


@given(seed=st.integers(0, 10**6), clipped=st.sampled_from([1.0, 0.05]))
def test_rounding_that_every_step_repeats_is_not_what_is_left(seed: int, clipped: float) -> None:
    random = Random(seed)
    directions = []
    for _ in range(20):
        right, error = random.gauss(0.0, 100.0), random.gauss(0.0, 2.0)
        directions.append(measured(right, clipped * (right + error), right + error) | {"noise": 1.0})
    assert not has_hidden_left_over(directions, 2)


@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.05, 0.2]))
def test_gradients_of_nothing_but_rounding_are_not_what_is_left(seed: int, share: float) -> None:
    random, directions = Random(seed), []
    for _ in range(32):
        right, error = random.gauss(0.0, 3.0 * share), random.gauss(0.0, 3.0)
        directions.append(measured(right, right + error, right + error) | {"noise": 1.0})
    assert are_only_rounding(directions)
    found = JointTruth(recorded(COMPARED | {"limit": 16.0, "right": directions})).compare()
    assert found.outcome is Outcome.PASSED


@given(seed=st.integers(0, 10**6), factor=st.sampled_from([0.5, 0.8, 1.25, 2.0]))
def test_a_multiple_of_what_is_left_is_another_mistake(seed: int, factor: float) -> None:
    assert not has_hidden_left_over(coarse(Random(seed), 40, left=factor), 3)


def test_the_last_pass_of_many_copies_is_apart_where_no_single_one_shows_it() -> None:
    random, cases = Random(0), []
    for _ in range(20):
        own = [[random.gauss(0.0, 10.0), random.gauss(0.0, 4.0)] for _ in range(2)]
        shares = [[first + random.gauss(0.0, 10.0), last + random.gauss(0.0, 4.0)] for first, last in own]
        received = sum(first for first, _ in shares) + 2 * sum(last for _, last in own) + random.gauss(0.0, 0.5)
        every = {"received": received, "shares": shares, "own": own, "left": 0.0, "noise": 1.0}
        cases.append(replace(evidence().wrong[0], limit=16.0, copies=2.0, with_all_copies=every))
    assert not any(case.shows_its_last_pass for case in cases)
    assert has_last_pass_apart(cases)
    assert not has_last_pass_apart(cases[:2])


COMPARED = {
    "noise": [1.0], "wrong": [], "unsearched": [], "limit": LIMIT, "losses": 2, "right": [], "one_loss": False,
    "unconfirmed": [], "changed": [], "is_sum": False, "in_place": False, "alike": [], "judged": [["w", [0, 1]]],
    "doubtful": [], "layers": [], "norms": [1.0, 1.0], "own": [], "tied_apart": [], "perhaps_tied": [], "adds": [],
}  # fmt: skip


def recorded(*facts: dict[str, Any], passes: tuple[BackwardPass, ...] = ()) -> RecordedTraining:
    gradient = torch.ones(2, dtype=torch.float64)
    steps = tuple(
        RecordedStep(0, number, (Parameter("w", (2,), "float32"),), gradient, passes, facts={"joint": one})
        for number, one in enumerate(facts)
    )
    return RecordedTraining(tuple(RecordedRank(rank, 2, steps) for rank in range(2)))


def test_a_step_that_was_not_compared_is_told_beside_those_that_were() -> None:
    first, second = judge_gradients(recorded(COMPARED, {"why": "a rank did not come"}))
    assert (first.outcome, second.outcome) == (Outcome.PASSED, Outcome.SKIPPED)
    assert second.message == "not judged: step 1: a rank did not come"


@pytest.mark.parametrize(("received", "outcome"), [((1.6, 1.6), Outcome.PASSED), ((1.6, 0.0), Outcome.FAILED)])
def test_copies_that_differ_by_more_than_rounding_are_right_if_each_has_the_gradient_of_all(
    received: tuple[float, float], outcome: Outcome
) -> None:
    copies = [{**wrong_copy(one), "ranks": [rank]} for rank, one in enumerate(received)]
    assert JointTruth(recorded(COMPARED | {"wrong": copies})).compare().outcome is outcome


@pytest.mark.parametrize(
    ("weight", "outcome"),
    [(0.5, Outcome.PASSED), (1.0, Outcome.FAILED), (0.3, Outcome.SKIPPED), (None, Outcome.SKIPPED)],
)
@pytest.mark.parametrize("one_loss", [True, False])
def test_losses_may_be_summed_if_each_rank_divides_its_own(
    weight: float | None, outcome: Outcome, *, one_loss: bool
) -> None:
    call = {"function": "cross_entropy", "reduction": "mean", "terms": 4.0, "weight": weight, "even": True}
    objective = {"objective": {"calls": [call], "alone": True}}
    one = BackwardPass(0, torch.full((2,), 0.5, dtype=torch.float64), facts=objective)
    found = JointTruth(recorded(COMPARED | {"is_sum": True, "one_loss": one_loss}, passes=(one,))).compare()
    assert found.outcome is (Outcome.PASSED if outcome is Outcome.SKIPPED and not one_loss else outcome)
