"""`plumbline check` on ranks that compute one forward together: right ones are judged, and mistakes are named."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import joint_scenes
import pytest

from plumbline.check.function import CheckedFunction, check_function
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.rank.joint import comparison
from plumbline.check.report.lines import coverage_lines
from plumbline.check.verdict.verdict import Answer, answer_of
from plumbline.core.outcome import Outcome
from plumbline.ranks.run import run_on_ranks

RIGHT = (
    "megatron", "megatron-bfloat16", "experts", "variance", "similarity", "ring", "tensor-parallel",
    "sharded-tensor-parallel", "pipeline-by-hand", "pipeline-of-torch", "pipeline-with-buffers", "gathered-head",
    "sharded-gathered-head", "sequence-parallel", "gathered-columns", "padded", "flexible", "summed-ring",
    "balanced-experts", "overlapping-experts", "wrapped-experts", "checkpointed", "watched",
)  # fmt: skip

WRONG = {
    ("megatron", "input-gradient-not-reduced"): "some-parameters-not-synchronised",
    ("megatron", "counted-on-each-rank"): "exchanged-otherwise",
    ("megatron", "last-counted-on-each-rank"): "multiplied-by-ranks-of-the-same-samples",
    ("megatron", "last-counted-in-place"): "multiplied-by-ranks-of-the-same-samples",
    ("tensor-parallel", "gradients-not-zeroed"): "previous-step-not-zeroed",
    ("experts", "experts-not-divided"): "some-tensors-summed",
    ("overlapping-experts", "experts-not-divided"): "some-tensors-summed",
    ("wrapped-experts", "experts-not-divided"): "some-tensors-summed",
    ("experts", "exchanged-as-constant"): "lost-on-the-way-back",
    ("experts", "router-not-reduced"): "some-parameters-not-synchronised",
    ("balanced-experts", "router-not-reduced"): "some-parameters-not-synchronised",
    ("experts", "experts-averaged"): "blocks-averaged-with-each-other",
    ("variance", "gathered-gradient-not-reduced"): "exchanged-otherwise",
    ("experts", "exchanged-without-gradient"): "backward-wrong",
    ("ring", "no-gradient-to-neighbours"): "backward-wrong",
    ("summed-ring", "loss-not-divided"): "summed-over-ranks",
    ("ring", "first-not-reduced"): "some-parameters-not-synchronised",
    ("ring", "none-reduced"): "some-parameters-not-synchronised",
    ("pipeline-by-hand", "gradient-sent-doubled"): "exchanged-otherwise",
    ("gathered-head", "head-not-reduced"): "of-the-holders-samples",
    ("sharded-gathered-head", "head-not-reduced"): "of-the-holders-samples",
}


@cache
def check(*scene: str) -> CheckedFunction:
    checked = check_function(partial(joint_scenes.run, *scene), 4 if scene[0].startswith("sharded") else 2, steps=2)
    assert not any(end.has_failed for end in checked.ends), checked.ends
    return checked


def checked(*scene: str) -> CheckedTraining:
    (training,) = check(*scene).trainings
    return training


@pytest.mark.parametrize("scene", RIGHT)
def test_all_of_a_right_training_is_judged(scene: str) -> None:
    training = checked(scene)
    assert answer_of(training) is Answer.RIGHT, training.coverage.gradients
    _, recomputed, *_ = coverage_lines(training.coverage, "float32")
    assert recomputed.startswith("recomputed in float64 by all ranks together: ")


def test_a_rank_computes_again_alone_where_the_script_gathers_a_frozen_weight() -> None:
    training = checked("gathered-frozen-head")
    assert answer_of(training) is Answer.RIGHT
    (gradients,) = (one for one in training.findings if one.check == "gradients")
    assert "is the mean over 2 ranks of what the backward passes computed" in gradients.message


def test_a_module_that_only_calls_its_wrapper_is_no_joint_forward() -> None:
    training = checked("holder")
    assert answer_of(training) is Answer.RIGHT
    assert [one.outcome for one in training.findings if one.check == "buffers"] == [Outcome.PASSED]
    (gradients,) = (one for one in training.findings if one.check == "gradients")
    assert "is the mean over 2 ranks of what the backward passes computed" in gradients.message


@pytest.mark.parametrize("scene", ["quantised", "quantized-by-torch", "reversed", "not-zeroed-in-a-function"])
def test_a_derivative_of_the_script_s_own_is_not_judged(scene: str) -> None:
    training = checked(scene)
    assert answer_of(training) is Answer.NOT_JUDGED


def test_copies_that_a_script_itself_changes_otherwise_are_not_judged() -> None:
    assert answer_of(checked("edited-megatron")) is Answer.NOT_JUDGED


@pytest.mark.parametrize(("mistake", "answer"), [("", Answer.RIGHT), ("copies-counted-again", Answer.NOT_JUDGED)])
def test_gradients_that_own_code_clips_to_one_norm_are_judged(mistake: str, answer: Answer) -> None:
    assert answer_of(checked("clipped-megatron", mistake)) is answer


def test_a_plain_part_is_stepped_by_its_own_rank_where_others_are_reduced_in_the_step() -> None:
    training = checked("scaled-tensor-parallel")
    assert answer_of(training) is Answer.RIGHT_IN_PART  # nothing distinguishes the factors from replicated parameters
    assert training.coverage.updates.part == 1


def test_a_gradient_that_a_function_adds_is_told() -> None:
    (gradients,) = (one for one in checked("balanced-experts").findings if one.check == "gradients")
    assert "the backward of AddedLoss adds a gradient of its own, whose size was not judged" in gradients.message


@pytest.mark.parametrize("scene", ["alike-experts", "choosing-experts"])
def test_experts_that_begin_with_equal_values_are_not_accused(scene: str) -> None:
    training = checked(scene)
    assert answer_of(training) is Answer.RIGHT_IN_PART
    assert any("start with equal values on several ranks" in one.message for one in training.findings)


def test_a_bias_after_a_reduction_may_be_a_copy_that_nobody_reduces() -> None:
    training = checked("sequence-parallel", "bias-of-rows-not-reduced")
    assert answer_of(training) is Answer.RIGHT_IN_PART
    assert any(one.message.startswith("down.bias starts with equal values") for one in training.findings)


@pytest.mark.parametrize(("scene", "mistake"), WRONG)
def test_a_mistake_is_named(scene: str, mistake: str) -> None:
    training = checked(scene, mistake)
    bad = [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]
    assert ("gradients", WRONG[scene, mistake]) in {(one.check, one.cause) for one in bad}


def test_a_mistake_is_named_among_more_parameters_than_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MOST_HALVES", 16)
    training = checked("deep", "counted-on-each-rank")
    bad = [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]
    assert ("gradients", "exchanged-otherwise") in {(one.check, one.cause) for one in bad}


def test_weights_of_parts_that_are_averaged_wrongly_may_begin_apart() -> None:
    bad = [one for one in checked("experts", "experts-averaged").findings if one.outcome.is_bad]
    assert bad[0].check == "gradients"


def test_the_function_with_a_wrong_backward_is_named() -> None:
    bad = [one for one in checked("experts", "exchanged-without-gradient").findings if one.outcome.is_bad]
    assert "the backward of Exchanged is not the derivative of its forward" in bad[0].message


def test_copies_that_begin_apart_are_told_where_nothing_else_explains_the_gradients() -> None:
    bad = [one for one in checked("megatron", "seeded-by-rank").findings if one.outcome.is_bad]
    assert bad[0].cause == "exchanged-otherwise"
    assert "make those of up, down, first.weight that are not divided over ranks" in bad[0].message


def test_ranks_that_clip_by_norms_of_their_own_parts_are_named() -> None:
    training = checked("megatron", "clipped-by-own-norm")
    bad = [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]
    assert [(one.check, one.cause) for one in bad] == [("clipping", "clipped-shard-by-shard")]


@pytest.mark.parametrize("scene", ["megatron", "experts"])
def test_ranks_train_as_they_do_unchecked(scene: str) -> None:
    def alone(_: Any) -> Any:
        return joint_scenes.run(scene)

    losses = [end.value for end in run_on_ranks(alone, 2, timeout=120)]
    assert len(losses[0]) == joint_scenes.STEPS
    assert check(scene).values == losses


@pytest.mark.parametrize("scene", ["once-megatron", "once-tensor-parallel"])
def test_a_forward_that_fails_on_one_rank_when_it_is_run_again_does_not_end_the_training(scene: str) -> None:
    training = checked(scene)
    assert answer_of(training) is Answer.NOT_JUDGED
    reasons = [one.why for one in training.coverage.gradients.left_out] + [one.message for one in training.findings]
    assert any("rank 1: " in one and "this batch was seen before" in one for one in reasons)
    assert check(scene).values == check(scene.removeprefix("once-")).values


def test_a_forward_that_needs_no_other_rank_is_judged_by_its_own_backward_pass_where_it_cannot_run_again() -> None:
    training = checked("once-replicated")
    assert answer_of(training) is Answer.RIGHT, training.coverage.gradients
    assert not training.coverage.gradients.left_out
    assert any("this batch was seen before" in one.why for one in training.coverage.replays.left_out)
