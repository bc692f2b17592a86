"""A program trains what its final weights can show, and is not written where nothing of it could be trusted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.precision import PRECISIONS
from plumbline.core.topology import Topology
from plumbline.hunt.program.plain_model import NotExpressedError
from plumbline.hunt.program.plain_torch import PlainTorch
from plumbline.hunt.program.rounding import tolerance
from plumbline.hunt.program.visible import ORDERS, orders, visible
from plumbline.hunt.write_up import tolerance_of
from plumbline.workloads.generated import Recipe

CELL = Cell("torch", "mlp", "ddp", Topology(1, 2), "32", "cpu")
SCALED = Finding("gradients", Outcome.FAILED, "", cause="scaled-before-clipping")


def test_the_loss_among_samples_has_two_of_them_on_each_rank():
    problem = visible(PlainTorch(Recipe(batch_size=1, loss="in-batch"), CELL, SCALED), ())
    assert problem.batch == 2
    assert "two samples" in problem.differences
    larger = PlainTorch(Recipe(batch_size=6, loss="in-batch"), CELL, SCALED)
    assert visible(larger, ()) == larger


@pytest.mark.parametrize(("precisions", "trained_in"), [(("32", "64"), "64"), (("32", "bf16"), "32")])
def test_a_small_factor_is_shown_in_float64_where_the_trainer_has_it(precisions, trained_in):
    problem = visible(PlainTorch(Recipe(), CELL, SCALED), precisions)
    assert problem.precision == trained_in
    assert ("float64" in problem.differences) == (trained_in == "64")


@pytest.mark.parametrize(("shuffle", "tried"), [(True, ORDERS), (False, 1)])
def test_an_order_that_is_right_by_chance_is_followed_by_others(shuffle, tried):
    every = list(orders(PlainTorch(Recipe(shuffle=shuffle), CELL, SCALED)))
    assert [one.recipe.seed for one in every] == list(range(tried))
    assert ["seed" in one.differences for one in every] == [False] + [True] * (tried - 1)


def test_what_diverges_has_no_program(monkeypatch):
    assert 0 < float(tolerance_of(PlainTorch(Recipe(), CELL, SCALED))) < 1e-4
    monkeypatch.setattr("plumbline.hunt.write_up.tolerance", lambda problem: math.inf)
    with pytest.raises(NotExpressedError, match="diverges"):
        tolerance_of(PlainTorch(Recipe(), CELL, SCALED))


@pytest.mark.parametrize("cause", ["raised", "hung"])
def test_a_training_that_does_not_end_has_no_weights_to_compare(cause):
    assert tolerance_of(PlainTorch(Recipe(), CELL, Finding("launch", Outcome.FAILED, "", cause=cause))) == ""


def test_the_tolerance_is_that_of_the_precision():
    measured = [tolerance(PlainTorch(Recipe(), replace(CELL, precision=name), SCALED)) for name in PRECISIONS]
    assert measured == sorted(measured)  # from float64 to bfloat16
