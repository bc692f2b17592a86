"""`plumbline check` on pipelines: all of torch's schedules are judged, and mistakes are named."""

from __future__ import annotations

from functools import partial
from typing import Any

import joint_pipelines
import pytest

from plumbline.check.judge.noted import HeadlineNote
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.verdict.verdict import Answer, answer_of

SCHEDULES = (
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip

WRONG = {
    ("communicating", "gradient-sent-doubled"): "some-tensors-scaled",
    ("freed", "gradient-sent-doubled"): "exchanged-otherwise",
    ("kept-edge", "gradient-sent-doubled"): "exchanged-otherwise",
    ("passing-on", "gradient-sent-doubled"): "some-tensors-scaled",
    **dict.fromkeys(
        [(scene, "gradient-sent-doubled") for scene in ("beside", "computed", "multiplied", "shared")],
        "exchanged-otherwise",
    ),
    ("sent-in-float32", "gradient-sent-doubled"): "exchanged-otherwise",
    ("sent-in-bfloat16", "gradient-sent-doubled"): "exchanged-otherwise",
    ("tied", "tied-not-added"): "tied-gradients-not-added",
    ("alike", "layers-averaged"): "some-tensors-scaled",
    ("replicas", "replicas-not-averaged"): "some-parameters-not-synchronised",
    ("1F1B", "gradients-not-zeroed"): "previous-step-not-zeroed",
    ("Interleaved1F1B", "gradients-not-zeroed"): "previous-step-not-zeroed",
    ("InterleavedZeroBubble", "gradients-not-zeroed"): "previous-step-not-zeroed",
    ("1F1B", "divided-again"): "scaled-with-every-window",
    ("1F1B", "divided-again-then-by-windows"): "scaled-with-every-window",
    ("in-parts", "gradients-not-zeroed"): "previous-step-not-zeroed",
}


def checked(plumbline: Any, *scene: str, ranks: int = 0) -> CheckedTraining:
    ranks = ranks or (4 if scene[0] in ("in-parts", "replicas") else 2)
    check = plumbline.check(partial(joint_pipelines.run, *scene), ranks=ranks)
    assert not any(end.has_failed for end in check.ends), check.ends
    training: CheckedTraining
    (training,) = check.trainings
    return training


BY_HAND = (
    "in-parts", "replicas", "tied", "equal", "freed", "kept-edge", "passing-on", "beside", "sent-in-float32",
    "sent-in-bfloat16",
    "accumulated", "summed", "clipped", "computed", "multiplied", "shared", "transposed",
)  # fmt: skip


@pytest.mark.parametrize("scene", [*SCHEDULES, *BY_HAND])
def test_all_of_a_right_pipeline_is_judged(plumbline: Any, scene: str) -> None:
    kind = getattr(joint_pipelines.pipelining, f"Schedule{scene}", None)
    if scene in SCHEDULES and kind is None:
        pytest.skip(f"this version of torch has no Schedule{scene}")
    training = checked(plumbline, scene)
    assert answer_of(training) is Answer.RIGHT, training.coverage.gradients


@pytest.mark.parametrize(("scene", "is_told"), [("transposed", True), ("beside", False), ("freed", False)])
def test_it_is_told_which_gradients_of_activations_were_not_compared(plumbline: Any, scene: str, is_told: bool) -> None:
    """In one pipeline, a backward starts at other values than those that are sent."""
    notes = [one.message for one in checked(plumbline, scene).findings if isinstance(one, HeadlineNote)]
    assert ["Rank 1 received activations, but it is not known which backward pass" in one for one in notes] == [
        True
    ] * is_told


@pytest.mark.parametrize("scene", [("alike",), ("replicas", "weights-averaged")])
def test_stages_that_begin_alike_are_not_accused(plumbline: Any, scene: tuple[str, ...]) -> None:
    training = checked(plumbline, *scene)
    assert not [one for one in training.findings if one.outcome.is_bad]


def test_weights_of_different_stages_that_begin_equal_may_be_tied(plumbline: Any) -> None:
    training = checked(plumbline, "equal", "tied-not-added")
    notes = [one.message for one in training.findings if "For one tied weight, add up the gradients" in one.message]
    assert len(notes) == 1
    assert "embedding.weight on rank 0 and head.weight on rank 1" in notes[0]


@pytest.mark.parametrize("kind", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_gradients_that_no_schedule_scales_are_a_sum(plumbline: Any, kind: str) -> None:
    training = checked(plumbline, kind, "not-scaled")
    assert answer_of(training) is Answer.RIGHT
    assert [one for one in training.findings if "the sum over 4 micro-batches" in one.message]


@pytest.mark.parametrize("kind", ["GPipe", "Interleaved1F1B"])
def test_gradients_that_a_schedule_scales_are_a_mean(plumbline: Any, kind: str) -> None:
    (told,) = (one.message for one in checked(plumbline, kind).findings if one.check == "objective")
    assert told.startswith("Rank 1's own loss is the mean over its")


def test_stages_that_send_in_their_forward_are_judged_in_full(plumbline: Any) -> None:
    assert answer_of(checked(plumbline, "communicating")) is Answer.RIGHT


def test_stages_that_send_and_receive_in_their_forward_are_judged_on_three_ranks(plumbline: Any) -> None:
    """The ranks send different numbers of messages: the middle one both sends and receives."""
    assert answer_of(checked(plumbline, "passing-on", ranks=3)) is Answer.RIGHT


def test_what_a_sending_stage_leaves_behind_is_no_loss_to_be_averaged(plumbline: Any) -> None:
    assert not [one for one in checked(plumbline, "communicating", ranks=4).findings if one.outcome.is_bad]
    wrong = checked(plumbline, "communicating", "divided-by-all-ranks", ranks=4)
    assert answer_of(wrong) is Answer.WRONG


@pytest.mark.parametrize(("scene", "mistake"), WRONG)
def test_a_mistake_in_a_pipeline_is_named(plumbline: Any, scene: str, mistake: str) -> None:
    training = checked(plumbline, scene, mistake)
    bad = [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]
    assert ("gradients", WRONG[scene, mistake]) in {(one.check, one.cause) for one in bad}
