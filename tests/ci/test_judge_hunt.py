"""The judge's hunt: right trainers average correctly, mistakes have their effect, and counts match the file."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.workloads.generated import Recipe

CI = Path(__file__).parents[2] / "ci"


@pytest.fixture(scope="module")
def hunt(program):
    return program(CI / "judge_hunt.py")


@pytest.fixture(scope="module")
def parts(hunt):
    """The program's modules, by name."""
    import hunt_records
    import mutations
    import reductions
    import traces_apart
    import trainer_draws

    return {one.__name__: one for one in (hunt_records, mutations, reductions, trainer_draws, traces_apart)}


@pytest.mark.ranks(3)
def test_every_average_by_hand_is_the_mean():
    import sys

    sys.path.insert(0, str(CI / "judge_hunt"))
    from reductions import SUMS, sum_over_ranks

    rank = dist.get_rank()
    for kind in (*SUMS, "per-parameter"):
        tensors = [torch.full((2, 2), 1.0 + rank), torch.arange(3.0) * (rank + 1)]
        sum_over_ranks(kind, tensors, 2)
        assert torch.equal(tensors[0], torch.full((2, 2), 6.0)), kind
        assert torch.equal(tensors[1], torch.arange(3.0) * 6), kind


def test_the_same_number_is_the_same_draw(hunt):
    assert hunt.drawn(3, 5) == hunt.drawn(3, 5) != hunt.drawn(3, 6)


def test_a_trainer_is_drawn_that_the_problem_allows(parts):
    @given(parts["trainer_draws"].draws())
    def allowed(draw):
        trainer, recipe = draw.trainer, draw.recipe
        assert (trainer.reduction == "none") is (draw.cell.topology.devices == 1)
        if trainer.reduction == "ddp" and "unused" in recipe.layers:
            assert trainer.find_unused or trainer.static_graph
        if recipe.inputs == "sparse-tokens":
            assert (trainer.implementation, trainer.hook) == ("given", "none")

    allowed()


def test_every_operation_of_every_place_is_one_that_can_be_carried_out(parts):
    mutations = parts["mutations"]
    for place, operations in mutations.PLACES.items():
        for operation in operations:
            known = operation in mutations.VALUES or operation in ("dropped", "doubled", "rescaled", "delayed")
            assert known, (place, operation)


@pytest.mark.parametrize(
    ("operation", "first", "second"),
    [
        ("dropped", [0.0, 0.0], [3.0, 4.0]),
        ("doubled", [2.0, 4.0], [3.0, 4.0]),
        ("rescaled", [0.5, 1.0], [3.0, 4.0]),
        ("permuted-tensors", [3.0, 4.0], [3.0, 4.0]),
        ("delayed", [9.0, 9.0], [3.0, 4.0]),
    ],
)
def test_a_mistake_changes_the_tensor_that_was_drawn_at_its_step(parts, operation, first, second):
    mutation = parts["mutations"].Mutation("weights", operation, step=1, parameter=0)
    mutator = parts["mutations"].Mutator(mutation, 0)
    before = {"a": torch.tensor([9.0, 9.0]), "b": torch.tensor([9.0, 9.0])}
    assert mutator.values("weights", 0, before) == before
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    assert mutator.values("update", 1, tensors) is tensors
    changed = mutator.values("weights", 1, tensors)
    assert (changed["a"].tolist(), changed["b"].tolist()) == (first, second)


def test_a_mistake_of_one_rank_leaves_the_others_alone(parts):
    mutation = parts["mutations"].Mutation("clipping", "dropped", rank=1)
    assert [parts["mutations"].Mutator(mutation, rank).times("clipping", 4) for rank in (0, 1)] == [1, 0]


def training(value=1.0, *, gradient=2.0, skipped=False):
    step = Step(
        (MicroBatch(((0, 1),), (0, 1)),), {"w": torch.zeros(2)}, {"w": torch.full((2,), gradient)},
        {"w": torch.full((2,), value)}, (0.1,), skipped=skipped,
    )  # fmt: skip
    return Trace((RankTrace(0, 1, (step,)),))


def test_trainings_are_apart_by_a_part_of_their_length(parts):
    apart = parts["traces_apart"].apart
    assert apart(training(), training()) == 0.0
    assert apart(training(), training(1.01)) == pytest.approx(0.01 / 1.01, rel=1e-5)
    assert apart(training(), training(skipped=True)) == math.inf
    assert apart(training(), None) == math.inf


def test_what_overflowed_in_both_is_no_difference(parts):
    left, right = (training(gradient=math.nan, skipped=True) for _ in range(2))
    assert parts["traces_apart"].apart(left, right) == 0.0


def test_counts_are_of_what_was_scored_and_a_run_goes_on_behind_its_file(parts, tmp_path):
    records, mutations = parts["hunt_records"], parts["mutations"]
    right = records.Tried(1, 0, {}, {}, "cell")
    wrong = replace(right, mutation=asdict(mutations.Mutation("loss", "doubled")), difference=1.0)
    file = records.Records(tmp_path / "seed-1.jsonl")
    for one in (right, replace(wrong, accused=True, named=True), replace(right, number=1, obstacle="vacuous")):
        file.add(one)
    file.add(replace(wrong, number=2, vacuous="same bits"))
    file.add(replace(wrong, number=3, named=False))
    again = records.Records(tmp_path / "seed-1.jsonl")
    assert again.tried == file.tried
    assert again.has(0, mutated=True)
    assert again.has(1, mutated=True)
    assert not again.has(4, mutated=False)
    text = "\n".join(records.summary(again.tried))
    assert "right trainers judged: 1; accused: 0" in text
    assert "mutations scored: 2; escaped: 1 (50.0 %); named: 1 of 2 that have a name" in text


def test_a_problem_that_cannot_be_judged_is_not_tried_again(parts, tmp_path):
    records = parts["hunt_records"]
    file = records.Records(tmp_path / "seed-1.jsonl")
    file.add(records.Tried(1, 0, {}, {}, "cell", obstacle="unfit"))
    assert file.has(0, mutated=True)


def test_a_right_trainer_passes_and_a_mistake_in_it_is_caught(hunt, parts, tmp_path):
    trainer = parts["trainer_draws"].TrainerDraw(reduction="ring", accumulation="own-sum", sampler="contiguous")
    cell = Cell("drawn", "", "ddp", Topology(1, 2), "32", "cpu")
    draw = parts["trainer_draws"].Draw(trainer, Recipe(batch_size=4, accumulate=2, steps_per_epoch=3), cell)
    mutation = parts["mutations"].Mutation("reduction", "dropped", rank=1, step=1)
    with hunt.Hunt(tmp_path) as opened:
        assert opened.judged(draw, None).bad is None
        assert opened.judged(draw, mutation).bad.family in mutation.families


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_loss_scaler_may_hold_one_of_several_optimizers_back(hunt, parts, tmp_path, clip_norm):
    trainer = parts["trainer_draws"].TrainerDraw(reduction="tree", sampler="strided")
    recipe = Recipe(
        inputs="images", loss="squares", optimizer="several", schedule="warm-up", batch_size=10, steps_per_epoch=3,
        epochs=2, left_out=5, clip_norm=clip_norm, shuffle=True, seed=8,
    )  # fmt: skip
    cell = Cell("drawn", "", "ddp", Topology(1, 2), "16", "cpu")
    with hunt.Hunt(tmp_path) as opened:
        judged = opened.judged(parts["trainer_draws"].Draw(trainer, recipe, cell), None)
    steps = judged.trace.ranks[0].steps
    held_back = next(step for step in steps if step.held_back)
    assert not held_back.skipped
    assert held_back.gradients.keys().isdisjoint(held_back.held_back)
    assert held_back is not steps[-1]
    assert judged.bad is None, judged.bad


def test_a_draw_is_had_again_from_its_record(hunt, parts, tmp_path):
    draw, mutation = hunt.drawn(3, 5)
    record = parts["hunt_records"].Tried(3, 5, asdict(draw.trainer), asdict(draw.recipe), draw.cell.id)
    records = parts["hunt_records"].Records(tmp_path / "seed-3.jsonl")
    assert records.drawn(5) is None
    records.add(record)
    records.add(replace(record, mutation=asdict(mutation)))
    assert parts["hunt_records"].Records(tmp_path / "seed-3.jsonl").drawn(5) == (draw, mutation)
