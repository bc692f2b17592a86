"""A program trains what its final weights or samples can show."""

from __future__ import annotations

import pytest

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.hunt.program.problem import ORDERS, Problem
from plumbline.workloads.generated import Recipe

CELL = Cell("torch", "mlp", "ddp", Topology(1, 2), "32", "cpu")
SCALED = Finding("gradients", Outcome.FAILED, "", cause="scaled-before-clipping")


def test_the_loss_among_samples_has_two_of_them_on_each_rank():
    problem = Problem(Recipe(batch_size=1, loss="in-batch"), CELL, SCALED).visible(())
    assert problem.batch == 2
    assert "two samples" in problem.differences
    larger = Problem(Recipe(batch_size=6, loss="in-batch"), CELL, SCALED)
    assert larger.visible(()) == larger


@pytest.mark.parametrize(("precisions", "trained_in"), [(("32", "64"), "64"), (("32", "bf16"), "32")])
def test_a_small_factor_is_shown_in_float64_where_the_trainer_has_it(precisions, trained_in):
    problem = Problem(Recipe(), CELL, SCALED).visible(precisions)
    assert problem.cell.precision == trained_in
    assert ("float64" in problem.differences) == (trained_in == "64")


def test_the_samples_that_ranks_draw_are_shown_with_the_plainest_model():
    samples = Finding("samples", Outcome.FAILED, "8 draws of epoch 0 were repeats")
    problem = Problem(Recipe(inputs="tokens", layers=("batchnorm",), loss="token-mean"), CELL, samples)
    assert problem.visible(()).recipe == Recipe()


@pytest.mark.parametrize(("shuffle", "tried"), [(True, ORDERS), (False, 1)])
def test_an_order_that_is_right_by_chance_is_followed_by_others(shuffle, tried):
    every = list(Problem(Recipe(shuffle=shuffle), CELL, SCALED).orders())
    assert [one.recipe.seed for one in every] == list(range(tried))
    assert ["seed" in one.differences for one in every] == [False] + [True] * (tried - 1)
