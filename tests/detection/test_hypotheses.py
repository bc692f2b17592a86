"""Every hypothesis can be used in a report, and the most specific one that fits is the cause."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.causes import HYPOTHESES, GradientCase, Hypothesis, Match, explain, register
from plumbline.judge.hypothesis import OCCASIONAL, CountedCase, Evidence
from plumbline.subjects.load import load

FAMILIES = {
    "averaging", "sync", "data", "batch-coupling", "rng", "amp", "clipping", "accumulation", "unused-params", "buffers",
    "checkpoint", "loss-normalisation", "launch", "metrics", "optimizer",
}  # fmt: skip
"""DESIGN section 6: fixed."""

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "suites" / "detection"
KINDS = list(HYPOTHESES)
EVERY = [(kind, hypothesis) for kind, hypotheses in HYPOTHESES.items() for hypothesis in hypotheses]


def of_kind(kind):
    return kind.__name__


@pytest.mark.parametrize(("kind", "hypothesis"), EVERY, ids=[f"{k.__name__}-{h.name}-{h.family}" for k, h in EVERY])
def test_a_hypothesis_has_a_name_a_known_family_and_two_texts(kind, hypothesis):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", hypothesis.name)
    assert hypothesis.family in FAMILIES
    assert hypothesis.description
    assert hypothesis.hint
    if kind is GradientCase:
        shown = (
            "world", "micro_batches", "accumulate", "scale", "rank", "factor", "odd_factor", "batch_parts", "norm_rank",
            "tied", "tied_holder", "tied_factor", "stages", "wrong_ranks", "held", "stage_factors",
        )  # fmt: skip
        figures = dict.fromkeys(shown, 2)
        assert hypothesis.description.format(**figures)
        assert hypothesis.hint.format(**figures)


def test_a_short_window_of_one_micro_batch_is_described_in_the_singular():
    (short,) = [one for one in HYPOTHESES[GradientCase] if one.name == "short-window-divided-by-full-length"]
    described = short.description.format(micro_batches=1, accumulate=3)
    assert described == "divided by the 3 micro-batches of a full window, although this one has only 1"


@pytest.mark.parametrize("kind", KINDS, ids=of_kind)
def test_a_cause_is_described_in_one_way_within_a_family(kind):
    named = [(one.name, one.family, one.description) for one in HYPOTHESES[kind]]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("kind", KINDS, ids=of_kind)
def test_no_two_hypotheses_about_a_case_are_equally_specific(kind):
    """So that the order of registration does not matter."""
    numbers = [one.specificity for one in HYPOTHESES[kind]]
    assert len(numbers) == len(set(numbers))
    assert OCCASIONAL not in numbers


def test_the_judge_never_asks_who_the_trainer_is():
    """Otherwise, it could recognise mistakes by the trainer's name."""
    for file in (ROOT / "harness" / "plumbline" / "judge").rglob("*.py"):
        assert ".subject" not in file.read_text(), file


def test_every_family_has_a_known_bad_trainer():
    told = {family for subject in load(str(SUITE / "everybody.py")) for family in subject.train.expectation.families}
    assert told == FAMILIES


def test_every_known_bad_trainer_says_which_causes_are_right():
    """A trainer whose mistake has no name has no family and no cause."""
    for subject in load(str(SUITE / "everybody.py")):
        expected = subject.train.expectation
        assert bool(expected.causes) == bool(expected.families), subject.name


@dataclass(frozen=True)
class NumberCase(CountedCase):
    number: int


def multiple_of(divisor, specificity):
    def predict(case):
        if case.number % divisor == 0:
            yield Match(step=divisor, figures={"quotient": case.number // divisor})

    texts = f"{{quotient}} × {divisor}", f"look at {divisor}"
    return Hypothesis(f"multiple-of-{divisor}", "data", predict, *texts, specificity)


@pytest.fixture
def registry():
    """Remove what a test registers."""
    kept = {kind: [*hypotheses] for kind, hypotheses in HYPOTHESES.items()}
    yield
    HYPOTHESES.clear()
    HYPOTHESES.update(kept)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("number", "cause"), [(12, "multiple-of-6"), (9, "multiple-of-3"), (7, "unexplained")])
def test_the_most_specific_hypothesis_that_fits_is_the_cause(number, cause):
    register(NumberCase, multiple_of(3, 30), multiple_of(6, 60), multiple_of(2, 20))
    found = explain(Finding("numbers", Outcome.FAILED, "it is wrong"), NumberCase(number))
    assert found.cause == cause
    if number == 12:
        assert (found.message, found.step) == ("it is wrong: 2 × 6; look at 6", 6)


@dataclass(frozen=True)
class Occasions(Evidence):
    """Always fits a hypothesis if its number is in ``always``, and otherwise on some occasions."""

    always: tuple[float, ...]

    def match(self, hypothesis):
        return Match(when="" if hypothesis.specificity in self.always else "now and then")


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("always", "specificity"), [((300, 200, 50), 300), ((200, 50), 200), ((50,), 300)])
def test_what_fits_always_comes_before_what_fits_now_and_then_and_this_before_what_is_fitted(always, specificity):
    register(Occasions, *(Hypothesis(f"of-{n}", "data", lambda case: (), "", "", n) for n in (50, 200, 300)))
    found = explain(Finding("numbers", Outcome.FAILED, "it is wrong"), Occasions(always))
    assert found.cause == f"of-{specificity}"
