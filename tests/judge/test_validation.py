"""A due evaluation must have happened: at the right time, on all held-out samples, in evaluation mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plumbline.core.outcome import Outcome
from plumbline.core.training_behavior import ORDINARY, TrainingBehavior
from plumbline.evidence.trace import Evaluation, MicroBatch, RankTrace, Step, Trace
from plumbline.judge.checks.validation import validation
from plumbline.judge.expected_metrics import evaluations_due
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.subjects.load import load
from plumbline.workloads import WORKLOADS

WORKLOAD = WORKLOADS["validation"]  # windows of four micro-batches; due after every second batch
PLACES = [*((step, micro) for step in range(4) for micro in (0, 2) if step or micro), (4, 0)]


def shares(world, count):
    return [tuple(range(rank, count, world)) for rank in range(world)]


def trace_of(world, evaluations, own_loss=False):
    """Return ranks that stepped correctly, with their evaluations; weights do not matter."""
    micro = MicroBatch(((0,),), None if own_loss else (0,))
    steps = tuple(Step((micro,) * size, {}, {}, {}, (0.1,)) for size in (4, 4, 4, 4))
    return Trace(tuple(RankTrace(rank, world, steps, evaluations=tuple(evaluations[rank])) for rank in range(world)))


def right(world, count, places=PLACES):
    return [[Evaluation(*place, ids, False) for place in places] for ids in shares(world, count)]


@pytest.fixture
def asked(cell_of):
    def asked(evaluations, own_loss=False):
        world = len(evaluations)
        cell = cell_of("validation", "ddp" if world > 1 else "none", f"1x{world}")
        return validation(TraceAnalysis(trace_of(world, evaluations, own_loss), WORKLOAD, cell))

    return asked


def count(world):
    return len(WORKLOAD.val_dataset(world))


def changed(evaluations, **changes):
    return [[replace(evaluation, **changes) for evaluation in own] for own in evaluations]


@pytest.fixture
def due_in(cell_of):
    def due_in(workload, behavior=ORDINARY):
        analysis = TraceAnalysis(Trace(()), WORKLOADS[workload], cell_of(workload, "none", "1x1"), behavior)
        return [places[0] for places in evaluations_due(analysis)]

    return due_in


def test_it_is_due_inside_of_windows_and_between(due_in):
    assert due_in("validation") == PLACES
    assert due_in("metrics") == [(1, 0), (3, 0)]
    assert not due_in("mlp")


def test_by_iterations_batches_are_counted_from_the_start_of_the_training(due_in):
    """Two epochs of five batches in windows of three are four steps: twelve batches by iterations, none short."""
    assert due_in("metrics", TrainingBehavior(data="iterations")) == [(1, 0), (2, 0), (3, 0), (4, 0)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shares_that_make_a_whole_are_right(asked, world):
    assert asked(right(world, count(world))).outcome is Outcome.PASSED


def test_one_rank_may_do_it_alone_and_all_may_do_everything(asked):
    everything = [Evaluation(*place, tuple(range(count(2))), False) for place in PLACES]
    assert asked([everything, []]).outcome is Outcome.PASSED
    assert asked([everything, everything]).outcome is Outcome.PASSED


def test_evaluations_that_nobody_asked_for_are_no_mistake(asked):
    own = right(1, count(1))[0]
    more = [Evaluation(0, 0, (0, 1), False), *own, Evaluation(1, 1, (3,), False), own[-1]]
    assert asked([more]).outcome is Outcome.PASSED


def test_the_moment_before_the_step_is_as_good_as_the_one_after_it(asked):
    before = {(1, 0): (0, 4), (2, 0): (1, 4), (3, 0): (2, 4), (4, 0): (3, 4)}
    assert asked(right(2, count(2), [before.get(place, place) for place in PLACES])).outcome is Outcome.PASSED


def test_what_fills_up_a_batch_harms_nobody_that_leaves_it_out_of_the_figures(asked):
    first, *others = right(3, count(3))
    filled = [changed([first], samples=(*first[0].samples, 0, 1, 2, 3))[0], *others]
    assert asked(filled).outcome is Outcome.PASSED


def test_without_the_jobs_loss_the_step_is_all_that_can_be_asked_for(asked):
    elsewhere = [(0, 1), (1, 0), (1, 1), (2, 0), (2, 3), (3, 0), (3, 1), (4, 0)]
    assert asked(right(1, count(1), elsewhere), own_loss=True).outcome is Outcome.PASSED
    assert asked(right(1, count(1), elsewhere)).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("cause", "family", "wrong"),
    [
        ("never-evaluated", "metrics", lambda own: [() for _ in own]),
        ("evaluated-in-training-mode", "buffers", lambda own: changed(own, training=True)),
        ("evaluated-once-an-epoch", "metrics", lambda own: right(2, count(2), [(2, 0), (4, 0)])),
        ("waits-for-the-step", "metrics", lambda own: right(2, count(2), [(1, 0), (2, 0), (3, 0), (4, 0)])),
        ("steps-counted", "metrics", lambda own: right(2, count(2), [(2, 0), (4, 0)])),
        ("evaluations-missing", "metrics", lambda own: [rank[1:] for rank in own]),
        ("only-some-ranks-evaluate", "data", lambda own: [own[0], []]),
        ("ranks-evaluate-alike", "data", lambda own: [own[0], own[0]]),
        ("tail-dropped", "data", lambda own: [changed([rank], samples=rank[0].samples[:-2])[0] for rank in own]),
        ("evaluates-another-dataset", "data", lambda own: [changed([own[0]], samples=(99,))[0], own[1]]),
        ("held-out-samples-missing", "data", lambda own: [changed([own[0]], samples=own[0][0].samples[1:])[0], own[1]]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(asked, cause, family, wrong):
    finding = asked(wrong(right(2, count(2))))
    assert finding.outcome is Outcome.FAILED
    # With two windows per epoch, two of three steps end an epoch, however steps are counted.
    assert finding.cause in {cause, "evaluated-once-an-epoch"} if cause == "steps-counted" else finding.cause == cause
    assert finding.family == family


def test_other_steps_than_the_workloads_leave_no_moment_to_ask_about(cell_of):
    trace = trace_of(1, right(1, count(1)))
    short = Trace((replace(trace.ranks[0], steps=trace.ranks[0].steps[:3]),))
    assert validation(TraceAnalysis(short, WORKLOAD, cell_of("validation", "none", "1x1"))) is None


def test_where_none_is_due_there_is_no_question(cell_of):
    assert validation(TraceAnalysis(trace_of(1, [[]]), WORKLOADS["mlp"], cell_of("mlp", "none", "1x1"))) is None


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_the_projects_own_trainers_say_that_they_evaluate_and_report(name):
    for subject in load(name):
        pipelines = set(subject.backends) == {"pp"}  # torch's trainers evaluate nothing
        assert pipelines or {"validation", "metrics"} <= subject.capabilities
