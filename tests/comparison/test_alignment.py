"""What is compared: cells of one place, subjects by name or position, and cells of one run."""

from __future__ import annotations

import pytest

from plumbline.core.errors import UsageError
from plumbline.core.outcome import Outcome
from plumbline.report.comparison.alignment import align_runs, align_within

GOOD = [Outcome.PASSED]


@pytest.fixture(scope="module")
def run_of(build_run, place):
    """Makes a run with passed cells, given by subject and place."""

    def run(*cells, **header):
        return build_run({place(words, subject): GOOD for subject, words in cells}, **header)

    return run


def found(alignment):
    return [(pair.cell, pair.versus, pair.a is not None, pair.b is not None) for pair in alignment.pairs]


def test_cells_of_one_place_answer_to_each_other(run_of):
    a = run_of(("reference", "mlp ddp 1x2 32"), ("reference", "mlp dp 1x2 32"))
    b = run_of(("reference", "mlp ddp 1x2 32"), ("reference", "adam ddp 1x2 32"))
    assert found(align_runs(a, b)) == [
        ("mlp ddp 1x2 32", "", True, True),
        ("mlp dp 1x2 32", "", True, False),
        ("adam ddp 1x2 32", "", False, True),
    ]


def test_one_subject_each_is_aligned_by_position_and_that_is_said(run_of):
    a, b = run_of(("lightning", "mlp ddp 1x2 32")), run_of(("fabric", "mlp ddp 1x2 32"))
    aligned = align_runs(a, b)
    assert found(aligned) == [("mlp ddp 1x2 32", "", True, True)]
    assert "by position: lightning (A), fabric (B)" in aligned.notes[0]


def test_subjects_of_the_same_name_need_no_word(run_of):
    a = run_of(("lightning", "mlp ddp 1x2 32"))
    assert align_runs(a, a).notes == ()


def test_several_subjects_are_aligned_by_name(run_of):
    a = run_of(("lightning", "mlp ddp 1x2 32"), ("fabric", "mlp ddp 1x2 32"))
    b = run_of(("fabric", "mlp ddp 1x2 32"), ("ignite", "mlp ddp 1x2 32"))
    assert found(align_runs(a, b)) == [
        ("lightning mlp ddp 1x2 32", "", True, False),
        ("fabric mlp ddp 1x2 32", "", True, True),
        ("ignite mlp ddp 1x2 32", "", False, True),
    ]


def test_several_subjects_without_a_common_name_are_not_guessed_at(run_of):
    a = run_of(("lightning", "mlp ddp 1x2 32"), ("fabric", "mlp ddp 1x2 32"))
    with pytest.raises(UsageError, match="no name in common"):
        align_runs(a, run_of(("ignite", "mlp ddp 1x2 32")))


def test_a_run_without_cells_is_compared_with_nothing(run_of):
    with pytest.raises(UsageError, match="has no cells"):
        align_runs(run_of(("reference", "mlp ddp 1x2 32")), run_of())


def test_a_simulated_run_answers_to_a_real_one(build_run, place):
    a, b = (build_run({place(accelerator=one): GOOD}) for one in ("cpu", "cuda"))
    assert found(align_runs(a, b)) == [("mlp ddp 1x2 32", "", True, True)]


def test_backends_are_held_against_the_first_that_is_there(run_of):
    """dp does not support several nodes; there, ddp2 is compared with ddp."""
    places = ("mlp auto 1x2 32", "mlp dp 1x2 32", "mlp ddp 1x2 32", "mlp ddp 2x2 32", "mlp ddp2 2x2 32")
    aligned = align_within(run_of(*(("reference", words) for words in ("mlp none 1x1 32", *places))), "backend")
    assert found(aligned) == [
        ("mlp 1x2 32", "dp → ddp", True, True),
        ("mlp 1x2 32", "dp → auto", True, True),
        ("mlp 2x2 32", "ddp → ddp2", True, True),
    ]
    assert aligned.notes == ("Cells without a counterpart that differs only in backend: 1.",)


def test_precisions_are_held_against_the_first_of_the_plan(run_of):
    aligned = align_within(
        run_of(*(("reference", f"mlp ddp 1x2 {bits}") for bits in ("32", "16", "bf16"))), "precision"
    )
    assert [pair.versus for pair in aligned.pairs] == ["32 → 16", "32 → bf16"]


def test_gpu_counts_are_held_against_the_fewest(run_of):
    places = ("mlp ddp 1x8 32", "mlp ddp 1x2 32", "mlp ddp 2x4 32", "mlp ddp 2x2 32")
    aligned = align_within(run_of(*(("reference", words) for words in places)), "gpus")
    assert found(aligned) == [("mlp ddp 1 node 32", "2 → 8", True, True), ("mlp ddp 2 nodes 32", "2 → 4", True, True)]


def test_subjects_of_one_run_are_held_against_the_first(run_of):
    aligned = align_within(run_of(("torch", "mlp ddp 1x2 32"), ("lightning", "mlp ddp 1x2 32")), "subject")
    assert found(aligned) == [("mlp ddp 1x2 32", "torch → lightning", True, True)]


def test_a_run_with_one_value_has_nothing_to_compare(run_of):
    with pytest.raises(UsageError, match="nothing to compare by backend: they have ddp"):
        align_within(run_of(("reference", "mlp ddp 1x2 32")), "backend")


def test_values_that_never_meet_have_nothing_to_compare(run_of):
    run = run_of(("reference", "mlp none 1x1 32"), ("reference", "mlp ddp 1x2 32"))
    with pytest.raises(UsageError, match="no two cells differ only in it"):
        align_within(run, "backend")


def test_no_cells_are_nothing_to_compare(run_of):
    with pytest.raises(UsageError, match="there are no cells"):
        align_within(run_of(), "backend")
