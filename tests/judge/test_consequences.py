"""Which findings follow from which: the root cause is first, and independent findings are never hidden."""

from __future__ import annotations

import itertools

import pytest

from plumbline.core.finding import ORDER, Finding, diagnosis, in_reading_order
from plumbline.core.outcome import Outcome
from plumbline.judge.checks import CHECKS
from plumbline.judge.judge import RULES, mark_consequences
from plumbline.judge.trace_analysis import TraceAnalysis


def bad(check, cause=None, family=None, step=None, outcome=Outcome.FAILED):
    return Finding(check, outcome, "", cause=cause, family=family, step=step)


def in_order(findings):
    return tuple(in_reading_order(mark_consequences(findings)))


def origins(*findings):
    return {one.check: one.consequence_of for one in in_order(findings) if one.outcome.is_bad}


def test_unsynchronised_gradients_explain_that_ranks_part_and_where_training_ends():
    found = in_order((
        bad("ranks-agree", "not-synchronised", "sync", 0),
        bad("training", step=7),
        Finding("samples", Outcome.PASSED, ""),
        bad("gradients", "not-synchronised", "sync", 0),
    ))  # fmt: skip
    assert [one.check for one in found] == ["gradients", "ranks-agree", "training", "samples"]
    assert [one.consequence_of for one in found] == [None, "gradients", "gradients", None]


def test_a_wrong_update_is_no_consequence_of_a_wrong_gradient():
    told = origins(
        bad("gradients", "summed-over-ranks", "averaging", 0), bad("update", "scaled-update", "optimizer", 0)
    )
    assert told == {"gradients": None, "update": None}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (bad("samples", "set-epoch-never-called", "data", 4), bad("gradients", "summed-over-ranks", "averaging", 0)),
        (
            bad("samples", "set-epoch-never-called", "data", 4),
            bad("steps", "stepped-every-micro-batch", "accumulation"),
        ),
        (bad("gradients", "summed-over-ranks", "averaging", 0), bad("buffers", "buffers-not-broadcast", "buffers", 1)),
        (bad("gradients", "not-clipped", "clipping", 0), bad("learning-rate", "no-schedule", "optimizer", 1)),
        (bad("steps", "stepped-every-micro-batch", "accumulation", 0), bad("gradients", "not-synchronised", "sync", 0)),
        (bad("gradients", "summed-over-ranks", "averaging", 0), bad("metrics", "one-rank-for-all", "metrics", 1)),
    ],
)
def test_independent_mistakes_both_stand(first, second):
    assert set(origins(first, second).values()) == {None}


def test_an_origin_did_not_begin_later_than_its_consequence():
    parted, later = bad("ranks-agree", "not-synchronised", "sync", 1), bad("gradients", "one-step-late", "sync", 3)
    assert origins(parted, later)["ranks-agree"] is None


def test_one_cause_that_two_checks_saw_is_told_once():
    told = origins(
        bad("skipped-steps", "moved-when-skipped", "amp", 2), bad("stillness", "moved-when-skipped", "amp", 2)
    )
    assert told == {"skipped-steps": None, "stillness": "skipped-steps"}


def test_consequences_of_consequences_name_the_root():
    told = origins(
        bad("learning-rate", "rates-differ", "optimizer", 0),
        bad("ranks-agree", "rates-differ", "optimizer", 0),
        bad("gradients", "unexplained", None, 1),
        bad("training", step=7),
    )
    assert told == {
        "learning-rate": None, "ranks-agree": "learning-rate", "gradients": "learning-rate", "training": "learning-rate"
    }  # fmt: skip


def test_a_rank_that_begins_after_another_has_stepped_in_the_same_memory_is_a_consequence():
    told = origins(
        bad("initial-weights", "initialised-anew", "sync"), bad("update", "applied-once-a-rank", "averaging", 0)
    )
    assert told == {"initial-weights": "update", "update": None}


@pytest.mark.parametrize("cause", ["optimizer-state-altered", "weights-not-restored"])
def test_a_rank_that_parted_and_resumes_with_what_another_saved_is_a_consequence(cause):
    told = origins(
        bad("gradients", "not-synchronised", "sync", 4),
        bad("ranks-agree", "not-synchronised", "sync", 9),
        bad("metrics", "unexplained", None, 5),
        bad("checkpoint", cause, "checkpoint", 7),
    )
    assert told == {"gradients": None, "ranks-agree": "gradients", "metrics": "gradients", "checkpoint": "gradients"}


@pytest.mark.parametrize(
    "checkpoint",
    [
        bad("checkpoint", "optimizer-state-altered", "checkpoint", 3),
        bad("checkpoint", "optimizer-state-dropped", "checkpoint", 7),
    ],
)
def test_a_checkpoint_that_is_wrong_before_ranks_part_or_lost_what_they_had_stands_by_itself(checkpoint):
    told = origins(
        bad("gradients", "not-synchronised", "sync", 4), bad("ranks-agree", "not-synchronised", "sync", 9), checkpoint
    )
    assert told["checkpoint"] is None


def test_a_check_that_raised_is_no_consequence():
    told = origins(
        bad("gradients", "zero", "optimizer", 0), *(bad(c, outcome=Outcome.ERRORED) for c in ("update", "training"))
    )
    assert told == {"gradients": None, "update": None, "training": None}


def test_rules_speak_of_checks_that_there_are():
    assert (
        {rule.check for rule in RULES} | {rule.origin for rule in RULES}
        <= set(CHECKS[TraceAnalysis]) | {"launch"}
        == set(ORDER)
    )
    assert all(rule.why for rule in RULES)


def test_there_is_always_a_finding_that_stands_by_itself():
    every = [bad(check, step=0) for check in ORDER]
    found = in_order(every)
    roots = [one for one in found if one.consequence_of is None]
    assert roots
    assert diagnosis(found) is found[0]
    assert all(one.consequence_of in {root.check for root in roots} for one in found if one.consequence_of)


def test_the_order_does_not_depend_on_the_order_of_asking():
    findings = [bad("gradients", "not-synchronised", "sync", 0), bad("ranks-agree", "not-synchronised", "sync", 0),
                bad("training", step=3), bad("update", "scaled-update", "optimizer", 0)]  # fmt: skip
    answers = {in_order(one) for one in itertools.permutations(findings)}
    assert len(answers) == 1
