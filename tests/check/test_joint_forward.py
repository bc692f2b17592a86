"""`plumbline check` on ranks that compute one forward together: right ones are judged, and mistakes are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCENES = Path(__file__).with_name("joint_scenes.py")

START = "import sys; from plumbline.cli.main import main; sys.exit(main(sys.argv[1:]))"

RIGHT = (
    "megatron", "megatron-bfloat16", "experts", "variance", "ring", "tensor-parallel", "sharded-tensor-parallel",
    "pipeline-by-hand", "pipeline-of-torch",
)  # fmt: skip

WRONG = {
    ("megatron", "input-gradient-not-reduced"): "some-parameters-not-synchronised",
    ("megatron", "counted-on-each-rank"): "exchanged-otherwise",
    ("experts", "experts-not-divided"): "some-tensors-summed",
    ("variance", "gathered-gradient-not-reduced"): "exchanged-otherwise",
    ("ring", "no-gradient-to-neighbours"): "exchanged-otherwise",
}


def launched(*scene: str) -> list[str]:
    ranks = 4 if scene[0].startswith("sharded") else 2
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--standalone",
        str(SCENES),
        *scene,
    ]


def checked(folder: Path, *scene: str) -> tuple[int, dict[str, Any], list[str]]:
    """Return the exit code, the verdict as JSON, and what the script printed."""
    report = folder / "verdict.json"
    command = [sys.executable, "-c", START, "check", "--json", str(report), "--", *launched(*scene)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert report.is_file(), done.stderr
    return done.returncode, json.loads(report.read_text()), sorted(done.stdout.splitlines())


@pytest.mark.parametrize("scene", RIGHT)
def test_all_of_a_right_training_is_judged(tmp_path: Path, scene: str) -> None:
    code, verdict, _ = checked(tmp_path, scene)
    (training,) = verdict["trainings"]
    assert (code, verdict["verdict"]) == (0, "right"), verdict["sentence"]
    assert training["coverage"]["compared"] > 0.95


@pytest.mark.parametrize(("scene", "mistake"), WRONG)
def test_a_mistake_is_named(tmp_path: Path, scene: str, mistake: str) -> None:
    code, verdict, _ = checked(tmp_path, scene, mistake)
    (training,) = verdict["trainings"]
    first = next(one for one in training["findings"] if one["outcome"] == "failed")
    assert (code, first["check"], first["cause"]) == (1, "gradients", WRONG[scene, mistake])


@pytest.mark.parametrize("scene", ["megatron", "experts"])
def test_the_script_trains_as_it_does_alone(tmp_path: Path, scene: str) -> None:
    alone = subprocess.run(launched(scene), capture_output=True, text=True, check=True)
    assert checked(tmp_path, scene)[2] == sorted(alone.stdout.splitlines())
