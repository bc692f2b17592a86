"""What mistakes predict of single parameters, whose gradients are known along random directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plumbline.check.evidence.training import BackwardPass, Parameter, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.gradients import judge_gradients
from plumbline.check.judge.joint_gradient import JointGradient
from plumbline.check.judge.joint_truth import JointTruth
from plumbline.core.outcome import Outcome
from plumbline.judge.mistakes.accumulation import PREVIOUS_STEP_NOT_ZEROED
from plumbline.judge.mistakes.case import Combination, SomeParameters
from plumbline.judge.mistakes.synchronisation import only
from plumbline.judge.truth import GradientEvidence

NOISE, LIMIT = 1e-7, 128.0


def measured(right: float, left: float, received: float) -> dict[str, Any]:
    return {"received": received, "left": left, "shares": [[right / 2], [right / 2]], "noise": NOISE}


def evidence(*right: dict[str, Any]) -> GradientEvidence[JointGradient]:
    named = {
        "name": "weight",
        "ranks": [0],
        "right": 1.0,
        "again": [],
        "began_alike": False,
        "copies": 1,
        "one_gradient": False,
        "parts": [],
        "in_pieces": False,
        "with_all_copies": None,
    }
    wrong = [{**measured(1.0, 0.5, 1.5), **named}]
    found = {"wrong": wrong, "right": list(right), "limit": LIMIT, "judged": [], "losses": 2}
    return GradientEvidence([JointGradient.of(1, found["wrong"][0], found, 2)])


@pytest.mark.parametrize(
    ("right", "fits"),
    [
        (measured(1e-4, 1e-6, 1.01e-4), True),  # rounding hides what the step before left
        (measured(1.0, 0.5, 1.0), False),
        (measured(0.0, 0.0, 0.0), True),
    ],
)
def test_a_mistake_in_all_gradients_has_to_predict_the_right_ones(right: dict[str, Any], fits: bool) -> None:
    assert (evidence(right).match(PREVIOUS_STEP_NOT_ZEROED) is not None) == fits


def copy_of(received: float, *, shares: list[list[float]], own: list[list[float]]) -> JointGradient:
    every = {"received": received, "left": 0.0, "shares": shares, "own": own, "noise": NOISE}
    return replace(evidence().wrong[0], began_alike=True, copies=2.0, with_all_copies=every)


SHARES, OWN = [[0.3, 0.5], [0.1, 0.7]], [[0.2, 0.1], [0.05, 0.4]]


@pytest.mark.parametrize(
    ("received", "is_whole", "last_pass_is_apart"),
    [(1.6, True, False), (0.3 + 0.1 + 2 * 0.5, False, True), (2 * 0.75, False, False), (0.0, False, False)],
)
def test_what_a_copy_received_is_told_from_what_all_copies_should(
    received: float, *, is_whole: bool, last_pass_is_apart: bool
) -> None:
    case = copy_of(received, shares=SHARES, own=OWN)
    assert (case.is_whole, case.last_pass_is_apart) == (is_whole, last_pass_is_apart)


def test_right_gradients_that_can_be_seen_refute_a_mistake_in_all() -> None:
    (own,) = evidence(measured(1.0, 0.0, 1.0)).wrong
    assert min(own.misfits(Combination(only({0}, 3.0)))) == float("inf")
    assert min(own.misfits(SomeParameters(Combination(only({0}, 3.0))))) == 0


COMPARED = {
    "noise": [1.0], "wrong": [], "unsearched": [], "limit": LIMIT, "losses": 2, "right": [], "one_loss": False,
    "changed": [], "is_sum": False, "in_place": False, "alike": [], "judged": [["w", [0, 1]]], "doubtful": [],
    "norms": [1.0, 1.0], "own": [], "tied_apart": [],
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
