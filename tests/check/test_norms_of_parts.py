"""`plumbline check` on ranks that clip a divided model: right is the norm of all parts, counting each copy once."""

from __future__ import annotations

from functools import partial

import joint_scenes
import pytest

from plumbline.check.function import check_function
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.verdict.verdict import Answer, answer_of
from plumbline.core.finding import Finding

SCENES = ("tensor-parallel", "experts", "pipeline-of-torch", "pipeline-by-hand")

WRONG = {
    ("experts", "clipped-by-own-norm"): "clipped-shard-by-shard",
    ("experts", "clipped-by-own-norm-by-hand"): "clipped-shard-by-shard",
    ("pipeline-of-torch", "clipped-by-own-norm"): "clipped-shard-by-shard",
    ("pipeline-by-hand", "clipped-by-own-norm"): "clipped-shard-by-shard",
    ("tensor-parallel", "clipped-with-copies"): "counted-again-in-the-norm",
    ("experts", "clipped-with-copies"): "counted-again-in-the-norm",
}


def checked(*scene: str) -> CheckedTraining:
    check = check_function(partial(joint_scenes.run, *scene), 2, steps=2)
    assert not any(end.has_failed for end in check.ends), check.ends
    (training,) = check.trainings
    return training


def bad(training: CheckedTraining) -> list[Finding]:
    return [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]


@pytest.mark.parametrize("scene", SCENES)
def test_the_norm_of_the_whole_model_is_right(scene: str) -> None:
    training = checked(scene, "clipped-by-all")
    assert answer_of(training) is Answer.RIGHT, bad(training)


def test_the_norm_is_right_where_the_script_also_reduces_and_clips_by_itself() -> None:
    training = checked("experts", "clipped-by-hand")
    assert answer_of(training) is Answer.RIGHT, training.coverage.gradients


def test_ranks_that_compute_other_layers_of_one_model_are_not_compared() -> None:
    assert not bad(checked("branches", "clipped-by-hand"))


def test_one_factor_at_every_step_is_no_clipping() -> None:
    training = checked("experts", "clipped-by-one-factor")
    assert answer_of(training) is Answer.NOT_JUDGED, training.coverage.gradients


@pytest.mark.parametrize(("scene", "mistake"), WRONG)
def test_another_norm_is_named(scene: str, mistake: str) -> None:
    found = [(one.check, one.cause) for one in bad(checked(scene, mistake))]
    assert found == [("clipping", WRONG[scene, mistake])]
