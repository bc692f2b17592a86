"""Figures of different machines are not compared, the differences are listed, and outcomes are still compared."""

from __future__ import annotations

import pytest

from plumbline.core.outcome import Outcome
from plumbline.core.software import Software
from plumbline.machine.fingerprint import ComparabilityKey
from plumbline.report.comparison.compare import OutcomeKind, compare_runs, compare_within
from plumbline.report.comparison.figure_changes import FigureVerdict
from plumbline.results.header_footer import SubjectCode


@pytest.fixture(scope="module")
def run_with(build_run, place, measured):
    """Makes a run of one cell and one figure, with changes in its header."""

    def run(outcome=Outcome.PASSED, seconds=1.0, **header):
        figure = measured(place(), "step_p50", [seconds, 1.01 * seconds, 0.99 * seconds])
        return build_run({place(): [outcome]}, [figure], **header)

    return run


@pytest.mark.parametrize("field", ComparabilityKey.model_fields)
def test_every_field_of_the_key_makes_figures_incomparable(run_with, field):
    key = run_with().header.fingerprint.key
    other = 3 if isinstance(getattr(key, field), int) else "something else"
    comparison = compare_runs(run_with(), run_with(seconds=9.0, key=key.model_copy(update={field: other})))
    assert [difference.what for difference in comparison.machine] == [field.replace("_", " ")]
    assert [figure.verdict for figure in comparison.figures] == [FigureVerdict.NOT_COMPARABLE]


def test_simulated_devices_are_not_compared_with_real_ones(run_with):
    comparison = compare_runs(run_with(simulated=True), run_with())
    assert [str(difference) for difference in comparison.machine] == ["devices: simulated (A), real (B)"]


def test_devices_that_are_shared_are_not_compared_with_those_that_are_not(run_with):
    comparison = compare_runs(run_with(), run_with(options={"oversubscribe": True}))
    assert [difference.what for difference in comparison.machine] == ["oversubscribe"]


def test_outcomes_are_compared_whatever_the_machines(run_with):
    comparison = compare_runs(run_with(), run_with(Outcome.FAILED, simulated=True))
    assert [change.kind for change in comparison.outcomes] == [OutcomeKind.NEWLY_FAILING]


def test_other_software_is_told_and_does_not_forbid(run_with):
    a, b = run_with(), run_with(subjects={"lightning": Software("lightning", "2.6.6", "2.13.0", "3.11.7")})
    changed = b.header.fingerprint.model_copy(update={"environment": {"OMP_NUM_THREADS": "4"}, "commit": "abc"})
    b = type(b)(
        b.header.model_copy(update={"fingerprint": changed}), b.results, b.footer, b.path, False, b.measurements
    )
    comparison = compare_runs(a, b)
    assert comparison.machine == ()
    told = [str(difference) for difference in comparison.software]
    assert "plumbline's commit: not set (A), abc (B)" in told
    assert "OMP NUM THREADS: not set (A), 4 (B)" in told
    assert "subject: not set (A), lightning 2.6.6 (B)" in told


def test_runs_made_apart_are_said_to_be(run_with):
    assert any("were measured at different times" in note for note in compare_runs(run_with(), run_with()).notes)
    turns = run_with(options={"in_turns": "a token"})
    assert any("were interleaved" in note for note in compare_runs(turns, turns).notes)
    assert any("were measured at different times" in note for note in compare_runs(turns, run_with()).notes)


def test_simulated_devices_are_said_to_be(run_with):
    simulated = run_with(simulated=True)
    assert any("simulated" in note for note in compare_runs(simulated, simulated).notes)


def test_what_is_not_whole_is_said_to_be(build_run, place):
    whole = build_run({place(): [Outcome.PASSED]})
    assert compare_runs(whole, whole).incomplete == ()
    (said,) = compare_runs(whole, build_run({place(): [Outcome.FAILED]}, finished=False)).incomplete
    assert "no footer" in said
    (said,) = compare_runs(build_run({place(): [Outcome.PASSED], place("adam ddp 1x2 32"): []}), whole).incomplete
    assert "no result for 1 of 2 cells" in said


def test_backends_of_one_run_are_compared(build_run, place, measured):
    figures = [
        measured(place(f"mlp {backend} 1x2 32"), "throughput", [speed, 1.01 * speed, 0.99 * speed])
        for backend, speed in (("dp", 100.0), ("ddp", 150.0))
    ]
    cells = {place(f"mlp {backend} 1x2 32"): [Outcome.PASSED] for backend in ("dp", "ddp")}
    comparison = compare_within(build_run(cells, figures), "backend")
    (figure,) = comparison.figures
    assert (figure.versus, figure.verdict) == ("dp → ddp", FigureVerdict.BETTER)
    assert comparison.as_before == 1
    assert compare_within(build_run(cells, figures[1:]), "backend").outcomes == ()


def test_gpu_counts_of_one_run_are_compared_though_each_has_a_key_of_its_own(build_run, place, measured):
    """More devices have a larger total batch: within a run, that is the question."""
    figures = [
        measured(
            place(f"mlp ddp 1x{gpus} 32"), "throughput", [speed, 1.01 * speed, 0.99 * speed], workload_key=str(gpus)
        )
        for gpus, speed in ((2, 100.0), (4, 190.0))
    ]
    cells = {place(f"mlp ddp 1x{gpus} 32"): [Outcome.PASSED] for gpus in (2, 4)}
    (figure,) = compare_within(build_run(cells, figures), "gpus").figures
    assert (figure.versus, figure.verdict) == ("2 → 4", FigureVerdict.BETTER)


def test_the_subject_s_source_and_commit_are_told_first(run_with):
    a, b = (run_with(code={"mine": SubjectCode(sha256=32 * one, commit=20 * one)}) for one in ("a1", "b2"))
    told = [str(difference) for difference in compare_runs(a, b).software]
    assert told == [
        "subject's source: a1a1a1a1a1a1 (A), b2b2b2b2b2b2 (B)",
        f"subject's commit: {20 * 'a1'} (A), {20 * 'b2'} (B)",
    ]
