"""Every explanation says what it has to say, in words that the report can use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.judge.causes.mistakes import CONCLUSIONS, PREDICTIONS
from harness.subjects.load import load

FAMILIES = {
    "averaging", "sync", "data", "batch-coupling", "rng", "amp", "clipping", "accumulation", "unused-params", "buffers",
    "checkpoint", "loss-normalisation", "launch", "metrics", "optimizer",
}  # fmt: skip
"""DESIGN section 6: fixed."""

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "suites" / "detection"
EXPLANATIONS = PREDICTIONS + CONCLUSIONS


@pytest.mark.parametrize("explanation", EXPLANATIONS, ids=lambda one: f"{one.name}-{one.family}")
def test_an_explanation_has_a_name_a_known_family_and_two_sentences(explanation):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", explanation.name)
    assert explanation.family in FAMILIES
    assert explanation.look
    figures = dict.fromkeys(("world", "micro_batches", "scale", "rank", "factor"), 2)
    assert explanation.saw.format(**figures)


def test_a_cause_is_explained_in_one_way_within_a_family():
    named = [(one.name, one.family, one.saw) for one in EXPLANATIONS]
    assert len(named) == len(set(named))


def test_causes_of_counts_have_known_families():
    for file in (ROOT / "harness" / "judge" / "causes").glob("*.py"):
        for family in re.findall(r'Cause\(\s*"[a-z0-9-]+",\s*"([a-z-]+)"', file.read_text()):
            assert family in FAMILIES, file


def test_the_judge_never_asks_who_the_trainer_is():
    """Where it did, it could recognise mistakes by name, and not understand them."""
    for file in (ROOT / "harness" / "judge").rglob("*.py"):
        assert ".subject" not in file.read_text(), file


def test_every_family_has_a_known_bad_trainer():
    told = {family for subject in load(str(SUITE / "everybody.py")) for family in subject.train.expectation.families}
    assert told == FAMILIES
