"""Trainings of two real ranks: each mistake is named, and right ones are not accused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import rank_scenes

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.forward_states import judge_buffers, judge_generator_states
from plumbline.check.judge.objective import judge_objective
from plumbline.check.judge.ranks_agree import judge_initial_weights, judge_ranks_agree
from plumbline.check.judge.rows_used import judge_rows_used
from plumbline.core.finding import Finding
from plumbline.judge.judge import SCRIPT_RULES, mark_consequences
from plumbline.ranks.run import run_on_ranks

CHECKS = (
    judge_initial_weights, judge_rows_used, judge_generator_states, judge_objective, judge_ranks_agree, judge_buffers,
)  # fmt: skip

RIGHT = (
    "right", "right_accumulation", "right_by_hand", "right_alone", "right_benchmark", "right_few_tokens",
    "right_two_losses", "right_evaluated_on_training_data", "own_statistics",
    "right_sharded", "right_tensor_parallel",
)  # fmt: skip

WRONG = {
    "no_sampler": ("samples", "no-sampler"),
    "sharded_without_sampler": ("samples", "no-sampler"),
    "same_rank": ("samples", "ranks-alike"),
    "seeds_differ": ("samples", "shards-overlap"),
    "whole_data": ("samples", "no-sampler"),
    "no_set_epoch": ("samples", "set-epoch-never-called"),
    "not_divided": ("objective", "not-divided-by-micro-batches"),
    "not_divided_and_fetched_in_advance": ("objective", "not-divided-by-micro-batches"),
    "divided_twice": ("objective", "divided-twice"),
    "biases_differ": ("initial-weights", "not-broadcast"),
    "never_broadcast": ("initial-weights", "not-broadcast"),
    "changed_between": ("ranks-agree", "changed-between-steps"),
    "overflow_in_statistics": ("buffers", None),
}


@pytest.fixture(scope="module")
def trainings() -> Mapping[str, RecordedTraining]:
    ends = run_on_ranks(lambda terminal: rank_scenes.train(terminal.rank), rank_scenes.WORLD, timeout=600)
    assert not any(end.has_failed for end in ends), ends
    left, right = (end.value for end in ends)
    return {name: RecordedTraining((left[name], right[name])) for name in left}


def findings(training: RecordedTraining) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(training)]


@pytest.mark.parametrize("scene", RIGHT)
def test_nothing_is_said_against_a_right_training(trainings: Mapping[str, RecordedTraining], scene: str) -> None:
    assert [finding for finding in findings(trainings[scene]) if finding.outcome.is_bad] == []


@pytest.mark.parametrize("scene", WRONG)
def test_a_mistake_is_named_and_nothing_else_is(trainings: Mapping[str, RecordedTraining], scene: str) -> None:
    found = mark_consequences(findings(trainings[scene]), SCRIPT_RULES, same_cause=False)
    bad = [one for one in found if one.outcome.is_bad and one.consequence_of is None]
    assert [(one.check, one.cause) for one in bad] == [WRONG[scene]]


def test_equal_dropout_masks_are_told_and_are_no_failure(trainings: Mapping[str, RecordedTraining]) -> None:
    (finding,) = judge_generator_states(trainings["right_accumulation"])
    assert "the same state on all ranks" in finding.message


def test_the_objective_counts_every_term_of_a_step(trainings: Mapping[str, RecordedTraining]) -> None:
    (finding,) = judge_objective(trainings["right_accumulation"])
    assert finding.message == "The loss is the mean over all 24 terms of cross_entropy."


def test_evidence_is_small(trainings: Mapping[str, RecordedTraining]) -> None:
    import json

    step = trainings["right"].ranks[0].steps[0]
    assert len(json.dumps([step.facts, [one.facts for one in step.passes]])) < 10_000
