"""Changes of outcomes: which are for the worse, and which are no change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.outcome import Outcome
from plumbline.report.comparison.compare import OutcomeKind, compare_runs
from plumbline.results.records import Expected

outcomes = st.lists(st.sampled_from(Outcome), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def change_from(build_run, place):
    """Returns how one cell changed, given its checks' outcomes; without any, it is planned but missing."""
    cell, other = place(), place("adam ddp 1x2 32")

    def change(was, now):
        runs = (
            build_run({one: ends for one, ends in ((cell, side), (other, [Outcome.PASSED])) if ends is not None})
            for side in (was, now)
        )
        (found, *more) = (*compare_runs(*runs).outcomes, None)
        assert more in ([], [None])
        return found and (found.kind, found.worse)

    return change


@pytest.mark.parametrize("bad", [outcome for outcome in Outcome if outcome.is_bad])
def test_what_fails_and_did_not_is_newly_failing(change_from, bad):
    for was in ([Outcome.PASSED], [Outcome.DEVIATES], [Outcome.UNSUPPORTED], [], None):
        assert change_from(was, [bad]) == (OutcomeKind.NEWLY_FAILING, True)


@pytest.mark.parametrize("bad", [outcome for outcome in Outcome if outcome.is_bad])
def test_what_failed_and_does_not_is_fixed(change_from, bad):
    for now in ([Outcome.PASSED], [Outcome.DEVIATES]):
        assert change_from([bad], now) == (OutcomeKind.FIXED, False)


@pytest.mark.parametrize("was", [[Outcome.PASSED], [Outcome.DEVIATES], [Outcome.FAILED]])
@pytest.mark.parametrize("now", [[Outcome.UNSUPPORTED], [Outcome.SKIPPED], [], None])
def test_what_had_an_answer_and_has_none_is_lost(change_from, was, now):
    assert change_from(was, now) == (OutcomeKind.LOST, True)
    assert change_from(now, was)[0] is (OutcomeKind.NEWLY_FAILING if was == [Outcome.FAILED] else OutcomeKind.NEW)


def test_deviating_is_a_change_for_the_worse_and_no_failure(change_from):
    assert change_from([Outcome.PASSED], [Outcome.DEVIATES]) == (OutcomeKind.CHANGED, True)
    assert change_from([Outcome.DEVIATES], [Outcome.PASSED]) == (OutcomeKind.CHANGED, False)


def test_another_check_that_fails_is_a_change_for_the_worse(change_from):
    fails, passes = Outcome.FAILED, Outcome.PASSED
    assert change_from([fails, passes], [passes, fails]) == (OutcomeKind.CHANGED, True)
    assert change_from([fails, fails], [passes, fails]) == (OutcomeKind.CHANGED, False)


def test_another_way_to_fail_is_a_change(change_from):
    assert change_from([Outcome.FAILED], [Outcome.CRASHED]) == (OutcomeKind.CHANGED, False)


@given(outcomes, outcomes)
def test_what_ends_alike_has_not_changed_and_what_is_worse_one_way_is_not_the_other(change_from, was, now):
    assert change_from(was, was) is None
    there, back = change_from(was, now), change_from(now, was)
    assert (there is None) == (back is None)
    # Failing in other checks, or losing a verdict and failing again, is bad both ways.
    if there == (OutcomeKind.FIXED, False):
        assert back == (OutcomeKind.NEWLY_FAILING, True)


def _expecting(run, outcome):
    """The same run with every finding expected."""
    expected = Expected(outcome=outcome, reason="known of old", entry="somewhere.toml, entry 1")
    return type(run)(
        run.header,
        tuple(result.model_copy(update={"expected": expected}) for result in run.results),
        run.footer,
        run.path,
    )


def test_what_is_known_to_fail_is_worse_than_passing_and_better_than_failing(build_run, place):
    failing, passing = (build_run({place(): [outcome]}) for outcome in (Outcome.FAILED, Outcome.PASSED))
    known = _expecting(failing, Outcome.FAILED)

    def change(a, b):
        (found,) = compare_runs(a, b).outcomes
        return found.kind, found.worse

    assert change(passing, known) == (OutcomeKind.CHANGED, True)
    assert change(failing, known) == (OutcomeKind.CHANGED, False)
    assert change(known, failing) == (OutcomeKind.NEWLY_FAILING, True)
    assert change(known, passing) == (OutcomeKind.FIXED, False)
    assert change(known, _expecting(passing, Outcome.FAILED)) == (OutcomeKind.NEWLY_FAILING, True)


def test_a_cell_that_was_being_written_when_its_run_broke_off_has_no_answer(build_run, place):
    whole = build_run({place(): [Outcome.PASSED]})
    broken = build_run({place(): [Outcome.PASSED]}, finished=False)
    (change,) = compare_runs(whole, broken).outcomes
    assert (change.kind, change.now) == (OutcomeKind.LOST, "missing")
    bad = build_run({place(): [Outcome.FAILED]}, finished=False)
    assert compare_runs(whole, bad).outcomes[0].kind is OutcomeKind.NEWLY_FAILING


def test_a_figure_that_is_not_measured_any_more_is_lost(build_run, place, measured):
    figures = [measured(place(), name, [1.0] * 3) for name in ("step_p50", "throughput")]
    a, b = (build_run({place(): [Outcome.PASSED]}, found) for found in (figures, figures[:1]))
    (change,) = compare_runs(a, b).outcomes
    assert (change.kind, change.was) == (OutcomeKind.LOST, "measured throughput")
    assert compare_runs(b, a).outcomes == ()


def test_figures_that_are_too_unsteady_are_no_lost_coverage(build_run, place, measured):
    """The suite skips a cell with unsteady throughput: the figure says so, and the cell was measured."""
    figures = [measured(place(), "step_p50", [1.0] * 3)]
    steady, unsteady = (build_run({place(): [end]}, figures) for end in (Outcome.PASSED, Outcome.SKIPPED))
    assert compare_runs(steady, unsteady).outcomes == compare_runs(unsteady, steady).outcomes == ()
    failed = build_run({place(): [Outcome.FAILED]}, figures)
    assert compare_runs(unsteady, failed).outcomes[0].kind is OutcomeKind.NEWLY_FAILING


def test_the_worst_comes_first(build_run, place):
    cells = [place(f"{workload} ddp 1x2 32") for workload in ("a", "b", "c", "d", "e")]
    passed, failed, deviates = [Outcome.PASSED], [Outcome.FAILED], [Outcome.DEVIATES]
    a = build_run(dict(zip(cells, (failed, passed, passed, [], passed), strict=True)))
    b = build_run(dict(zip(cells, (passed, deviates, [], passed, failed), strict=True)))
    comparison = compare_runs(a, b)
    assert [change.kind for change in comparison.outcomes] == list(OutcomeKind)
    assert comparison.as_before == 0
