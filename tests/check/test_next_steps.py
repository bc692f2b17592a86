"""The advice of a verdict on a training that could not be judged, or only in part."""

from __future__ import annotations

from pathlib import Path

import pytest
from checked_commands import RIGHT, checked, training

from plumbline.check.verdict.verdict import NEXT_STEPS, START_WITH_TORCHRUN, Answer, next_step, verdict_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def messages():
    """Return the package's sources, without the table's file."""
    files = (ROOT / "harness" / "plumbline").rglob("*.py")
    texts = [file.read_text(encoding="utf-8") for file in files if file.parts[-2:] != ("verdict", "verdict.py")]
    return "\n".join(texts)


@pytest.mark.parametrize("part", NEXT_STEPS)
def test_it_is_for_a_reason_that_is_given(part, messages):
    assert part in messages


@pytest.mark.parametrize("step", sorted({*NEXT_STEPS.values(), START_WITH_TORCHRUN}))
def test_the_docs_have_it(step):
    page = (ROOT / "docs" / "check-a-script.md").read_text(encoding="utf-8")
    _, _, table = page.partition("## If nothing could be judged")
    assert step in table.partition("\n## ")[0]


def test_a_training_that_is_right_has_none():
    verdict = verdict_of(checked(training(RIGHT)))
    assert (verdict.answer, verdict.next_step) == (Answer.RIGHT, "")


def test_a_script_that_failed_is_to_be_mended_first():
    verdict = verdict_of(checked(training(RIGHT), code=1))
    assert verdict.answer is Answer.NOT_JUDGED
    assert verdict.next_step == "run the command without Plumbline, and fix the error that it raises"


@pytest.mark.parametrize(
    "raised",
    ["KeyError: 'RANK'", "ValueError: Error initializing torch.distributed: environment variable RANK expected"],
)
def test_a_script_that_needs_a_launcher_is_to_be_started_with_torchrun(raised):
    failed = f"the script failed before its first optimizer step: exit code 1 ({raised})"
    assert next_step(failed, []) == START_WITH_TORCHRUN


def test_the_reason_in_the_sentence_comes_first():
    assert next_step("no gradients were judged: FSDP1 shards DTensors", []) == "use `fully_shard` (FSDP2)"
    assert next_step("it is blue", []) == ""
