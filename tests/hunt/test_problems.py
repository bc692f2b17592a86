"""Drawn problems: they need only declared capabilities, survive a round trip through a file, and can be judged."""

from __future__ import annotations

from dataclasses import asdict

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from plumbline.core.cell import Cell
from plumbline.core.errors import WorkloadError
from plumbline.core.topology import Topology
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.hunt.search import in_words, name_of, problems, recipes, write_problem
from plumbline.own_workloads.check import refuse_unfit
from plumbline.own_workloads.load import load_workload
from plumbline.planning.declaration import Declaration
from plumbline.subjects.declare import CAPABILITIES
from plumbline.workloads.generated import Generated, Recipe

CAPABLE = st.frozensets(st.sampled_from(sorted(CAPABILITIES)))


def workload_of(recipe):
    return type("Problem", (Generated,), {"name": name_of(recipe), "recipe": recipe})()


@given(st.data(), CAPABLE)
def test_a_recipe_needs_nothing_that_is_not_declared(data, capabilities):
    assert workload_of(data.draw(recipes(capabilities))).needs <= capabilities


@given(recipes(CAPABILITIES, own_loss=True))
def test_a_trainer_with_a_loss_of_its_own_is_asked_for_the_next_tokens_of_texts(recipe):
    workload = workload_of(recipe)
    assert workload.mean_over_labels
    columns = workload.dataset(2).columns
    shown, labels = columns["real"], columns["labels"]
    assert torch.equal(labels[shown], columns["tokens"][:, 1:][shown])
    assert bool((labels[~shown] == -100).all())


@given(recipes(CAPABILITIES, adapters_only=True))
def test_a_trainer_of_adapters_gets_a_model_in_which_nothing_else_is_trained(recipe):
    workload = workload_of(recipe)
    assert workload.adapters
    trained = {name.rpartition(".")[0] for name, one in workload.build().named_parameters() if one.requires_grad}
    assert trained
    assert {name.rpartition(".")[2] for name in trained} == {"down", "up"}


@given(recipes(CAPABILITIES))
def test_a_recipe_in_words_is_the_recipe(recipe):
    assert eval(in_words(recipe), {"Recipe": Recipe}) == recipe
    assert Recipe(**asdict(recipe)) == recipe


@given(st.data(), st.sampled_from([Topology(1, 2), Topology(1, 4), Topology(2, 2)]))
def test_the_batches_of_a_pipeline_divide_into_micro_batches(data, topology):
    cell = Cell("staged", "mlp", "pp", topology, "32", "cpu")
    declared = Declaration("staged", "staged.py", ("pp",), {"cpu": ["32"]}, CAPABILITIES)
    workload = workload_of(data.draw(problems([declared], [cell])).recipe)
    size = workload.global_batch_size(topology.devices)
    last = workload.samples(topology.devices) % size
    assert size % cell.parallelism.micro_batches == last % cell.parallelism.micro_batches == 0


@given(recipes(CAPABILITIES))
def test_an_evaluation_is_due_in_each_epoch_or_none_is_asked_for(recipe):
    assert recipe.validate_every is None or recipe.validate_every <= recipe.steps_per_epoch


def test_most_recipes_are_fit_to_judge_by(thorough):
    fit = []

    @given(recipes(CAPABILITIES), st.integers(1, 4))
    def counted(recipe, devices):
        try:
            refuse_unfit(workload_of(recipe), [devices])
        except WorkloadError:
            fit.append(False)
        else:
            fit.append(True)

    counted()
    assert sum(fit) > 0.8 * len(fit)


@given(recipes(CAPABILITIES))
def test_the_file_of_a_problem_has_the_same_weights_and_data(tmp_path_factory, recipe):
    loaded, made = load_workload(write_problem(recipe, tmp_path_factory.mktemp("problems"))), workload_of(recipe)
    assert (loaded.name, loaded.needs, loaded.steps(4)) == (made.name, made.needs, made.steps(4))
    for name, value in made.model().state_dict().items():
        assert torch.equal(loaded.model().state_dict()[name], value)
    for name, column in made.dataset(2).columns.items():
        assert torch.equal(loaded.dataset(2).columns[name], column)


@given(recipes(CAPABILITIES))
def test_every_parameter_but_those_of_some_layers_is_trained(recipe):
    assume({"unused", "frozen", "thawed", "adapter"}.isdisjoint(recipe.layers))
    workload = workload_of(recipe)
    model, batch = workload.model().train(), workload.dataset(2).batch(range(workload.global_batch_size(2)))
    assume(len(batch["index"]) > 1)
    workload.loss(model(batch), batch).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_layer_thaws_after_the_first_step_however_many_micro_batches_it_has():
    workload = workload_of(Recipe(layers=("thawed",), accumulate=2, steps_per_epoch=4))
    model, data = workload.model().train(), workload.dataset(1)
    optimizer = workload.optimizers(model.parameters())[0]
    trained = []
    for number in range(4):
        batch = data.batch(range(4 * number, 4 * number + 4))
        workload.loss(model(batch), batch).backward()
        trained.append(model.layers[0].inner.weight.grad is not None)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert trained == [False, False, True, True]


@given(st.data())
def test_a_trainer_by_iterations_gets_problems_without_the_end_of_an_epoch(data):
    cell = Cell("endless", "mlp", "none", Topology(1, 1), "32", "cpu")
    behavior = TrainingBehavior(data="iterations")
    declared = Declaration("endless", "endless.py", ("none",), {"cpu": ["32"]}, CAPABILITIES, behavior=behavior)
    assert workload_of(data.draw(problems([declared], [cell])).recipe).needs_epochs is None


@given(st.data())
def test_a_pipeline_that_needs_equal_batches_gets_no_smaller_one(data):
    cell = Cell("staged", "mlp", "pp", Topology(1, 2), "32", "cpu")
    behavior = TrainingBehavior(batches="equal")
    declared = Declaration("staged", "staged.py", ("pp",), {"cpu": ["32"]}, CAPABILITIES, behavior=behavior)
    workload = workload_of(data.draw(problems([declared], [cell])).recipe)
    assert workload.samples(2) % workload.global_batch_size(2) == 0
