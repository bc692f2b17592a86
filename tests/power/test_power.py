"""Power curves: errors have the requested size, and the limit separates caught from missed errors."""

from __future__ import annotations

import math

import pytest
import torch

from plumbline.cli.main import main
from plumbline.cli.power import power_lines
from plumbline.core.cell import Cell
from plumbline.core.errors import USAGE
from plumbline.core.topology import Topology
from plumbline.evidence.trace import Logged, MicroBatch, RankTrace, Step, Trace
from plumbline.judge.checks.gradients import compare_gradients
from plumbline.judge.checks.update import compare_updates
from plumbline.judge.oracle.oracle import Oracle
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.power import (
    KINDS,
    PRECISION,
    Place,
    Power,
    caught_in_most,
    gradient_off,
    places,
    smallest,
    update_off,
)
from plumbline.workloads import WORKLOADS

MLP = WORKLOADS["mlp"]


def recorded(precision, steps=2):
    """A recorded right training on one device: samples in order, and a report after its end."""
    cell = Cell("simulated", "mlp", "none", Topology(1, 1), precision, "cpu")
    trainer = Oracle(MLP, 1, cell.arithmetic)
    optimizer, made = trainer.optimizer(), []
    size = MLP.global_batch_size(1)
    for number in range(steps):
        samples = tuple(range(number * size, (number + 1) * size))
        before = {name: value.detach().clone() for name, value in trainer.parameters.items()}
        gradients = {name: value.to(trainer.dtype) for name, value in trainer.gradient((((samples,),),)).items()}
        trainer.set_gradients(gradients)
        optimizer.step()
        after = {name: value.detach().clone() for name, value in trainer.parameters.items()}
        rates = tuple(group["lr"] for group in optimizer.param_groups)
        made.append(Step((MicroBatch((samples,), samples),), before, gradients, after, rates))
    trainer.load(made[-1].before)
    loss = float(trainer.losses((((made[-1].micro_batches[0].samples,),),))[0][0])
    return cell, Trace((RankTrace(0, 1, tuple(made), logged=(Logged(steps, "loss", loss),)),))


@pytest.fixture(scope="module")
def training():
    return recorded("64")


@pytest.mark.parametrize("parameter", [None, "0.weight"])
@pytest.mark.parametrize("size", [1e-9, 1e-3])
def test_a_gradient_is_off_by_the_part_that_is_asked_for(training, size, parameter):
    _, trace = training
    names = trace.ranks[0].steps[1].gradients
    parameter = parameter and next(iter(names))
    wrong = gradient_off(trace, Place(1, parameter), size)
    for name, right in names.items():
        error = float((wrong.ranks[0].steps[1].gradients[name] - right).norm() / right.norm())
        assert error == pytest.approx(size if parameter in (None, name) else 0.0, rel=1e-4)
    assert wrong.ranks[0].steps[0] is trace.ranks[0].steps[0]
    assert wrong.ranks[0].steps[1].after is trace.ranks[0].steps[1].after


def test_an_update_is_off_by_a_part_of_the_update_not_of_the_weights(training):
    _, trace = training
    right = trace.ranks[0].steps[0]
    wrong = update_off(trace, Place(0, None), 0.5).ranks[0].steps[0]
    for name, before in right.before.items():
        torch.testing.assert_close(wrong.after[name] - before, 1.5 * (right.after[name] - before))


def test_what_is_no_larger_than_a_rounding_changes_nothing():
    _, trace = recorded("32")
    wrong = gradient_off(trace, Place(0, None), 1e-12)
    for name, right in trace.ranks[0].steps[0].gradients.items():
        assert torch.equal(wrong.ranks[0].steps[0].gradients[name], right)


def test_the_smallest_is_found_between_what_is_caught_and_what_is_not():
    found = smallest(lambda size: size >= 3e-7)
    assert 3e-7 <= found <= 3e-7 * PRECISION
    assert smallest(lambda size: False) == math.inf


def test_ninety_nine_of_a_hundred_leave_the_worst_one_out():
    assert caught_in_most([*map(float, range(99)), math.inf]) == 98.0
    assert caught_in_most([1.0, 2.0, 3.0], 0.5) == 2.0
    assert caught_in_most([]) is None


@pytest.mark.parametrize(
    ("kind", "compare", "inject"),
    [("gradient, one tensor", compare_gradients, gradient_off), ("update, one tensor", compare_updates, update_off)],
)
def test_a_limit_is_where_the_check_begins_to_fail(training, kind, compare, inject):
    cell, trace = training
    analysis = TraceAnalysis(trace, MLP, cell)
    (found,) = KINDS[kind](analysis, trace, 1, 0)
    (place,) = places(trace, 1, 0, whole=False)
    for size, fails in ((found * 1.5, True), (found / 1.5, False)):
        outcome = compare(TraceAnalysis(inject(trace, place, size), MLP, cell)).outcome
        assert outcome.is_bad is fails


def test_each_precision_has_the_limit_that_its_rounding_leaves():
    limits = {}
    for precision in ("64", "32", "bf16"):
        cell, trace = recorded(precision)
        (limits[precision],) = KINDS["gradient, all tensors"](TraceAnalysis(trace, MLP, cell), trace, 1, 0)
    assert limits["64"] < 1e-6 * limits["32"] < 1e-6 * limits["bf16"]


def test_a_report_is_judged_where_there_is_one(training):
    cell, trace = training
    analysis = TraceAnalysis(trace, MLP, cell)
    (limit,) = KINDS["metric"](analysis, trace, 1, 0)
    assert 0 < limit < 1e-5


def test_a_number_of_runs_that_measures_nothing_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["power", "--subject", "torch", "--runs", "0"])
    assert ended.value.code == USAGE
    assert "must be a whole number, 1 or more, not " in capsys.readouterr().err


@pytest.mark.parametrize(("runs", "words"), [(100, "99 of 100"), (20, "20 of 20"), (1, "1 of 1"), (300, "297 of 300")])
def test_the_number_of_runs_in_which_an_error_is_caught_is_the_one_that_was_counted(runs, words):
    """99 % of 20 runs is all of them, and the table says so."""
    cell = Cell("simulated", "mlp", "none", Topology(1, 1), "32", "cpu")
    text = "\n".join(power_lines([Power(cell, "gradient, one tensor", runs, 1e-6, 1e-7)]))
    assert words in text
    assert ("99 of 100" in text) == (runs == 100)
