"""`plumbline check` on pipelines: every schedule of torch is judged, and mistakes in them are named."""

from __future__ import annotations

from functools import partial
from typing import Any

import joint_pipelines
import pytest

from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.verdict.verdict import Answer, answer_of

SCHEDULES = (
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip

WRONG = {
    ("communicating", "gradient-sent-doubled"): "exchanged-otherwise",
    ("tied", "tied-not-added"): "tied-gradients-not-added",
    ("replicas", "replicas-not-averaged"): "some-parameters-not-synchronised",
    ("1F1B", "gradients-not-zeroed"): "previous-step-not-zeroed",
    ("Interleaved1F1B", "gradients-not-zeroed"): "previous-step-not-zeroed",
    ("InterleavedZeroBubble", "gradients-not-zeroed"): "previous-step-not-zeroed",
    ("1F1B", "divided-again"): "scaled-with-every-window",
    ("in-parts", "gradients-not-zeroed"): "previous-step-not-zeroed",
}


def checked(plumbline: Any, *scene: str) -> CheckedTraining:
    check = plumbline.check(
        partial(joint_pipelines.run, *scene), ranks=4 if scene[0] in ("in-parts", "replicas") else 2
    )
    assert not any(end.has_failed for end in check.ends), check.ends
    training: CheckedTraining
    (training,) = check.trainings
    return training


@pytest.mark.parametrize("scene", [*SCHEDULES, "in-parts", "replicas", "tied"])
def test_all_of_a_right_pipeline_is_judged(plumbline: Any, scene: str) -> None:
    kind = getattr(joint_pipelines.pipelining, f"Schedule{scene}", None)
    if scene in SCHEDULES and kind is None:
        pytest.skip(f"this version of torch has no Schedule{scene}")
    training = checked(plumbline, scene)
    assert answer_of(training) is Answer.RIGHT, training.coverage.gradients


@pytest.mark.parametrize("scene", [("alike",), ("replicas", "weights-averaged")])
def test_stages_that_begin_alike_are_not_accused(plumbline: Any, scene: tuple[str, ...]) -> None:
    training = checked(plumbline, *scene)
    assert not [one for one in training.findings if one.outcome.is_bad]


def test_stages_that_send_in_their_forward_are_judged_but_for_what_may_be_a_copy(plumbline: Any) -> None:
    training = checked(plumbline, "communicating")
    assert answer_of(training) is Answer.RIGHT_IN_PART
    assert training.coverage.gradients.part >= 0.95
    assert {name for one in training.coverage.gradients.left_out for name in one.names} == {
        "stage.norm.weight", "stage.norm.bias",
    }  # fmt: skip


@pytest.mark.parametrize(("scene", "mistake"), WRONG)
def test_a_mistake_in_a_pipeline_is_named(plumbline: Any, scene: str, mistake: str) -> None:
    training = checked(plumbline, scene, mistake)
    bad = [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]
    assert ("gradients", WRONG[scene, mistake]) in {(one.check, one.cause) for one in bad}
