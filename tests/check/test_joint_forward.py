"""`plumbline check` on ranks that compute one forward together: right ones are judged, and mistakes are named."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import joint_scenes
import pytest

from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.verdict.verdict import Answer, answer_of

START = "import sys; from plumbline.cli.main import main; sys.exit(main(sys.argv[1:]))"

RIGHT = (
    "megatron", "megatron-bfloat16", "experts", "variance", "similarity", "ring", "tensor-parallel",
    "sharded-tensor-parallel", "pipeline-by-hand", "pipeline-of-torch",
)  # fmt: skip

WRONG = {
    ("megatron", "input-gradient-not-reduced"): "some-parameters-not-synchronised",
    ("megatron", "counted-on-each-rank"): "exchanged-otherwise",
    ("deep", "counted-on-each-rank"): "exchanged-otherwise",
    ("tensor-parallel", "gradients-not-zeroed"): "previous-step-not-zeroed",
    ("experts", "experts-not-divided"): "some-tensors-summed",
    ("variance", "gathered-gradient-not-reduced"): "exchanged-otherwise",
    ("ring", "no-gradient-to-neighbours"): "exchanged-otherwise",
}


def checked(plumbline: Any, *scene: str) -> CheckedTraining:
    ranks = 4 if scene[0].startswith("sharded") else 2
    check = plumbline.check(partial(joint_scenes.run, *scene), ranks=ranks)
    assert not any(end.has_failed for end in check.ends), check.ends
    training: CheckedTraining
    (training,) = check.trainings
    return training


@pytest.mark.parametrize("scene", RIGHT)
def test_all_of_a_right_training_is_judged(plumbline: Any, scene: str) -> None:
    training = checked(plumbline, scene)
    assert answer_of(training) is Answer.RIGHT, training.coverage.gradients


@pytest.mark.parametrize("scene", ["quantised", "reversed"])
def test_a_derivative_of_the_script_s_own_is_not_judged(plumbline: Any, scene: str) -> None:
    training = checked(plumbline, scene)
    assert answer_of(training) is Answer.NOT_JUDGED


@pytest.mark.parametrize(("scene", "mistake"), WRONG)
def test_a_mistake_is_named(plumbline: Any, scene: str, mistake: str) -> None:
    training = checked(plumbline, scene, mistake)
    bad = [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]
    assert ("gradients", WRONG[scene, mistake]) in {(one.check, one.cause) for one in bad}


def test_ranks_that_clip_by_norms_of_their_own_parts_are_named(plumbline: Any) -> None:
    training = checked(plumbline, "megatron", "clipped-by-own-norm")
    bad = [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]
    assert [(one.check, one.cause) for one in bad] == [("clipping", "clipped-shard-by-shard")]


@pytest.mark.parametrize("scene", ["megatron", pytest.param("experts", marks=pytest.mark.nightly)])
def test_the_script_trains_as_it_does_alone(scene: str) -> None:
    script = Path(joint_scenes.__file__)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        scene,
    ]
    alone = subprocess.run(launch, capture_output=True, text=True, check=True)
    check = subprocess.run(
        [sys.executable, "-c", START, "check", "--", *launch], capture_output=True, text=True, check=True
    )
    assert sorted(check.stdout.splitlines()) == sorted(alone.stdout.splitlines())
