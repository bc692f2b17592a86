"""Problems on which searches accused a right trainer: the causes are fixed, and stay fixed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plumbline.hunt.search import Drawn, Search, cells_of
from plumbline.planning.declaration import Declaration
from plumbline.workloads.generated import Recipe

TURNS = Recipe(optimizer="several", batch_size=8, steps_per_epoch=5)
"""The reference trainer's optimizers take turns: each has its own pass over each micro-batch."""


@pytest.fixture
def search(warm_pool, tmp_path):
    return search_of("reference", warm_pool, tmp_path)


@pytest.mark.parametrize(
    "recipe",
    [
        replace(TURNS, accumulate=2),
        replace(TURNS, accumulate=3, clip_norm=0.05, validate_every=1),
        replace(TURNS, inputs="tokens", layers=("batchnorm", "linear-5"), accumulate=2, epochs=2, schedule="warm-up"),
        replace(TURNS, layers=("batchnorm",), clip_norm=0.05),
        Recipe(batch_size=2, steps_per_epoch=2, epochs=2, shuffle=True, seed=56),
        Recipe(layers=("adapter", "tanh", "adapter"), batch_size=8, steps_per_epoch=3, optimizer="adamw"),
        Recipe(layers=("experts",), batch_size=8, steps_per_epoch=3, optimizer="muon", accumulate=2),
    ],
    ids=lambda recipe: f"{recipe.optimizer}-{'-'.join(recipe.layers)}-{recipe.accumulate}-{recipe.clip_norm}",
)
@pytest.mark.parametrize(("backend", "topology"), [("none", "1x1"), ("ddp", "1x2")])
def test_it_is_right(search, recipe, backend, topology):
    assert search.train(Drawn(recipe, cell_among(search.cells, backend, topology, "32"))) is None
    assert search.counts["trained"] == 1


def test_what_is_exactly_zero_may_round_to_something_else(search):
    recipe = Recipe(layers=("linear-1", "layernorm"), batch_size=2)
    assert search.train(Drawn(recipe, cell_among(search.cells, "none", "1x1", "16"))) is None


def test_autocast_that_leaves_every_operation_in_32_bits_is_autocast(search):
    recipe = Recipe(inputs="tokens", loss="in-batch", batch_size=1, returns="nested")
    assert search.train(Drawn(recipe, cell_among(search.cells, "ddp", "1x2", "16"))) is None


def test_the_loss_of_each_order_is_rounded_in_16_bits_and_not_one_loss_alike_in_all_orders(search):
    recipe = Recipe(layers=("linear-1", "linear-1"), loss="squares", validate_every=1, metrics=True, seed=11)
    recipe = replace(recipe, batch_size=6)
    assert search.train(Drawn(recipe, cell_among(search.cells, "none", "1x1", "bf16"))) is None


def test_a_loss_has_a_noise_also_where_that_of_the_held_out_samples_overflows(search):
    recipe = Recipe(layers=("attention",) * 3, returns="nested", batch_size=8, steps_per_epoch=2, left_out=2, seed=632)
    assert search.train(Drawn(recipe, cell_among(search.cells, "ddp", "1x2", "16"))) is None


def test_buffers_are_resumed_that_the_next_forward_would_have_begun_with(warm_pool, tmp_path):
    search = search_of("torch", warm_pool, tmp_path)
    recipe = Recipe(layers=("batchnorm",), epochs=2, batch_size=8, interrupt_after=1)
    assert search.train(Drawn(recipe, cell_among(search.cells, "fsdp", "1x2", "32"))) is None


def cell_among(cells, backend, topology, precision):
    (cell,) = (
        one for one in cells if (one.backend, str(one.topology), one.precision) == (backend, topology, precision)
    )
    return cell


def search_of(subject, warm_pool, folder):
    pool = warm_pool(subject)
    declared = [Declaration.of(subject, one) for one in pool.subjects if one["name"] == subject]
    return Search(pool, declared, cells_of(declared, 2, "cpu"), folder)
