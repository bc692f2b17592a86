"""Judges of data, weights and objectives on hand-made evidence: what cannot be chance, and what may be intended."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.check.evidence.training import (
    BackwardPass,
    Facts,
    Parameter,
    RecordedRank,
    RecordedStep,
    RecordedTraining,
)
from plumbline.check.judge.forward_states import judge_buffers, judge_generator_states
from plumbline.check.judge.gradients import judge_gradients
from plumbline.check.judge.judged_gradients import judged_gradients
from plumbline.check.judge.noted import HeadlineNote
from plumbline.check.judge.objective import judge_objective
from plumbline.check.judge.optimized_parameters import judge_optimized_parameters
from plumbline.check.judge.rank_weights import model_parts, rank_layout, reduced_parameters
from plumbline.check.judge.ranks_agree import judge_initial_weights, judge_ranks_agree
from plumbline.check.judge.replayed_updates import replayed_updates
from plumbline.check.judge.rows_used import judge_rows_used
from plumbline.check.rank.observers.row_hashes import digest
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.judge import SCRIPT_RULES, mark_consequences

WRAPPED: Facts = {
    "modules": [{"class": "Net", "wrapper": {"ranks": 2}, "sharded_as_data": False, "layouts": []}],
    "meshes": [],
    "groups": [],
}


def forward(rows: Sequence[int], fetched: Facts | None = None, module: int = 0) -> Facts:
    return {
        "module": module,
        "training": True,
        "fetched": fetched,
        "rows": len(rows),
        "distinct": len(set(rows)),
        "order": digest(list(rows)),
        "hashes": list(rows),
    }


def a_rank(
    rank: int,
    passes: Sequence[Facts],
    *,
    local: Sequence[float] = (1.0, 2.0),
    vectors: Sequence[Sequence[float]] = (),
    received: Sequence[float] | None = None,
    unclipped: Sequence[float] | None = None,
    process: Facts | None = None,
    step: Facts | None = None,
    accumulate: int = 1,
    world: int = 2,
) -> RecordedRank:
    vector = torch.tensor(local, dtype=torch.float64)
    made = [
        BackwardPass(n, torch.tensor(vectors[n], dtype=torch.float64) if vectors else vector, facts=facts)
        for n, facts in enumerate(passes)
    ]
    steps = [
        RecordedStep(
            0,
            number,
            (Parameter("weight", (2,), "float32"),),
            vector * accumulate if received is None else torch.tensor(received, dtype=torch.float64),
            tuple(made[start : start + accumulate]),
            facts=step or {},
            unclipped=None if unclipped is None else torch.tensor(unclipped, dtype=torch.float64),
        )
        for number, start in enumerate(range(0, len(made), accumulate))
    ]
    return RecordedRank(rank, world, tuple(steps), {"parallelism": WRAPPED, **(process or {})})


def training(*ranks: RecordedRank) -> RecordedTraining:
    return RecordedTraining(ranks)


def of_rows(*ranks: Sequence[Sequence[int]], parallelism: Facts = WRAPPED) -> RecordedTraining:
    return training(
        *(
            a_rank(
                i,
                [{"batches": {"forwards": [forward(rows)]}} for rows in batches],
                process={"parallelism": parallelism},
            )
            for i, batches in enumerate(ranks)
        )
    )


def bad(findings: Any) -> list[str | None]:
    return [one.cause for one in findings if one.outcome.is_bad]


# Rows


def test_ranks_with_the_same_rows_are_accused() -> None:
    batches = [list(range(start, start + 4)) for start in range(0, 16, 4)]
    assert bad(judge_rows_used(of_rows(batches, batches))) == ["no-sampler"]


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 6), st.randoms(use_true_random=False))
def test_rows_drawn_with_replacement_are_never_accused(values: int, size: int, steps: int, draw: random.Random) -> None:
    def rank() -> list[list[int]]:
        return [[draw.randrange(values) for _ in range(size)] for _ in range(steps)]

    assert bad(judge_rows_used(of_rows(rank(), rank()))) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_data_of_a_few_rows_are_never_accused(rows: list[int]) -> None:
    batches = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    assert bad(judge_rows_used(of_rows(batches, batches))) == []


def test_ranks_that_draw_the_same_rows_again_in_the_same_order_are_accused() -> None:
    draw = random.Random(0)
    batches = [[draw.randrange(45) for _ in range(8)] for _ in range(4)]
    assert bad(judge_rows_used(of_rows(batches, batches))) == ["no-sampler"]


@pytest.mark.parametrize("row", [lambda place: place % 5, lambda place: place // 4 % 6, lambda place: place // 4])
def test_repeated_rows_in_the_order_of_the_data_are_no_evidence(row: Callable[[int], int]) -> None:
    batches = [[row(start + index) for index in range(8)] for start in range(0, 64, 8)]
    assert bad(judge_rows_used(of_rows(batches, batches))) == []


def test_a_fixed_batch_is_no_evidence() -> None:
    batches = [list(range(64))] * 4
    (finding,) = judge_rows_used(of_rows(batches, batches))
    assert finding.outcome is Outcome.PASSED


def test_equal_noise_beside_different_data_is_no_evidence() -> None:
    def rank(number: int) -> list[Facts]:
        data = [forward([100 * number + 10 * step + i for i in range(10)]) for step in range(4)]
        noise = [forward([5000 + 10 * step + i for i in range(10)], module=1) for step in range(4)]
        return [{"batches": {"forwards": [one, other]}} for one, other in zip(data, noise, strict=True)]

    assert bad(judge_rows_used(training(a_rank(0, rank(0)), a_rank(1, rank(1))))) == []


def test_equal_inputs_with_other_targets_are_no_evidence() -> None:
    def rank(number: int) -> list[Facts]:
        call = {"function": "mse_loss", "targets": str(number), "weight": 1.0, "terms": 1, "even": True, "value": 1.0}
        return [
            {
                "batches": {"forwards": [forward(range(10 * step, 10 * step + 10))]},
                "objective": {"calls": [{**call, "reduction": "mean"}], "alone": True},
            }
            for step in range(4)
        ]

    assert bad(judge_rows_used(training(a_rank(0, rank(0)), a_rank(1, rank(1))))) == []


@pytest.mark.parametrize("known", [True, False])
def test_equal_rows_with_other_masks_are_evidence_only_with_equal_targets(known: bool) -> None:
    one = {"targets": "a", "function": "mse_loss", "weight": 1.0, "terms": 1, "value": 1.0, "reduction": "mean"}
    passes = [
        {
            "batches": {"forwards": [forward(range(10 * step, 10 * step + 10))]},
            "generators": {"forwards": [{"states": {}, "drew": ["torch"]}]},
            "objective": {"calls": [one] if known else [], "alone": True},
        }
        for step in range(4)
    ]
    ranks = a_rank(0, passes), a_rank(1, passes, local=(-1.0, 2.0))
    assert bad(judge_rows_used(training(*ranks))) == (["no-sampler"] if known else [])


def test_equal_inputs_with_other_gradients_are_no_evidence() -> None:
    passes = [{"batches": {"forwards": [forward(range(10 * step, 10 * step + 10))]}} for step in range(4)]
    other = a_rank(1, passes, local=(-1.0, 2.0))
    assert bad(judge_rows_used(training(a_rank(0, passes), other))) == []


@pytest.mark.parametrize(
    "parallelism",
    [
        {"modules": []},
        {**WRAPPED, "groups": [2]},
        {**WRAPPED, "meshes": [{"shape": [1, 2], "names": ["dp", "tp"]}]},
        {**WRAPPED, "modules": [{**WRAPPED["modules"][0], "layouts": ["1: Shard"]}]},
        {**WRAPPED, "modules": [{**WRAPPED["modules"][0], "wrapper": None}]},
    ],
)
def test_ranks_that_may_share_rows_on_purpose_are_not_accused(parallelism: Facts) -> None:
    batches = [list(range(start, start + 8)) for start in range(0, 32, 8)]
    (finding,) = judge_rows_used(of_rows(batches, batches, parallelism=parallelism))
    assert finding.outcome is Outcome.PASSED
    assert "not known whether this is intended" in finding.message


def test_what_is_data_parallel() -> None:
    def layout(parallelism: Facts) -> bool:
        return rank_layout(of_rows([[1]], [[2]], parallelism=parallelism)).is_data_parallel

    sharded = {"class": "Net", "wrapper": None, "sharded_as_data": True}
    assert layout(WRAPPED)
    assert layout({**WRAPPED, "modules": [{**sharded, "layouts": ["1: Shard"]}]})
    hybrid = {**WRAPPED, "modules": [{**sharded, "layouts": ["2: Replicate Shard"]}], "groups": [2]}
    assert layout({**hybrid, "meshes": [{"shape": [2, 2], "names": []}]})
    assert layout({**WRAPPED, "meshes": [{"shape": [2, 1], "names": ["dp", "tp"]}]})
    assert not layout({**WRAPPED, "modules": [{**sharded, "layouts": ["2: Shard Shard"]}]})


# Samplers


def sampled(rank: int, **settings: Any) -> RecordedRank:
    """Return a rank that trained two whole epochs of a sampler with these settings."""
    one = {
        "sampler": 0, "class": "DistributedSampler", "distributed": True, "torch": True, "gradients": True,
        "complete": True, "steps": 5, "head": "a", "count": 10, "epoch": 0, "seed": 0, "rank": rank,
        "num_replicas": 2, "shuffle": True, "length": 20, **settings,
    }  # fmt: skip
    fetched = {"loader": 0, "pass": 0, "sampler": 0, "batch": 1}
    passes = [{"batches": {"forwards": [forward(range(100 * rank, 100 * rank + 10), fetched)]}}]
    return a_rank(rank, passes, process={"loaders": {"samplers": [one, {**one}]}})


@given(
    st.lists(st.floats(-1e4, 1e4, allow_subnormal=False), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 1e-7, 3e-7, 5e-7, 1e-6, 1e-2]), min_size=4, max_size=4),
    st.sampled_from([0.0, 1e-8, 1e-6]),
)
def test_a_gradient_is_right_where_its_error_is_at_most_the_limit(
    local: list[float], off: list[float], exact: float
) -> None:
    vector = torch.tensor(local, dtype=torch.float64)
    received = vector * (1 + torch.tensor(off, dtype=torch.float64))
    one = BackwardPass(0, vector, facts={}, exact=vector * (1 + exact))
    parameters = (Parameter("large", (2,), "float32"), Parameter("small", (2,), "float32"))
    step = RecordedStep(0, 0, parameters, received, (one,), facts={}, unclipped=None)
    made = training(RecordedRank(0, 1, (step,), {"parallelism": WRAPPED}))
    for finding in judge_gradients(made):
        if finding.error_x_noise is not None and finding.limit_x_noise is not None:
            assert (finding.error_x_noise <= finding.limit_x_noise) == (finding.outcome is Outcome.PASSED), finding


def test_two_epochs_of_one_order_are_accused() -> None:
    assert bad(judge_rows_used(training(sampled(0), sampled(1)))) == ["set-epoch-never-called"]


@pytest.mark.parametrize(
    "settings",
    [{"complete": False}, {"shuffle": False}, {"steps": 0}, {"gradients": False}],
)
def test_a_pass_that_did_not_train_is_no_epoch(settings: Facts) -> None:
    assert bad(judge_rows_used(training(sampled(0, **settings), sampled(1, **settings)))) == []


def test_a_sampler_that_may_not_shuffle_is_a_note() -> None:
    made = sampled(0, distributed=False, torch=False)
    for one in made.noted("loaders")["samplers"]:
        del one["shuffle"]
    (found,) = [one for one in judge_rows_used(training(made)) if isinstance(one, HeadlineNote)]
    assert found.message.startswith("2 epochs have the same order (sampler.epoch is 0 in each of them). Call")


def sharing(*samplers: Facts) -> RecordedTraining:
    """Return a training in which two ranks share 28 rows, and use no row twice."""
    made = []
    for rank in range(2):
        fetched = {"loader": 0, "pass": 0, "sampler": 0 if samplers else None, "batch": 1}
        batches = [range(10 * step + 12 * rank, 10 * step + 12 * rank + 10) for step in range(4)]
        passes = [{"batches": {"forwards": [forward(rows, fetched)]}} for rows in batches]
        noted = sampled(rank, **samplers[rank]).noted("loaders") if samplers else {}
        made.append(a_rank(rank, passes, process={"loaders": noted, "parallelism": WRAPPED}))
    return training(*made)


def test_parts_of_different_orders_are_a_note() -> None:
    note, rows = judge_rows_used(sharing())
    assert isinstance(note, HeadlineNote)
    assert note.message.startswith("Several ranks used 28 rows of the recorded steps, and no rank used one twice.")
    assert rows.message.startswith("several ranks used 28 rows in the same epoch")


def test_shards_of_data_sets_that_differ_are_accused() -> None:
    shards = {"complete": False}
    assert bad(judge_rows_used(sharing(shards, shards))) == ["shards-overlap"]
    unshuffled = {"shuffle": False}  # rows may come in pairs
    assert bad(judge_rows_used(sharing(unshuffled, unshuffled))) == []


def test_epochs_of_one_order_that_end_early_are_a_note() -> None:
    ranks = sampled(0, complete=False), sampled(1, complete=False)
    (found,) = [one for one in judge_rows_used(training(*ranks)) if isinstance(one, HeadlineNote)]
    assert "2 epochs have the same order although the sampler shuffles" in found.message


def test_seeds_that_differ_are_accused() -> None:
    ranks = sampled(0, complete=False), sampled(1, seed=1, complete=False)
    assert bad(judge_rows_used(training(*ranks))) == ["shards-overlap"]


# Parameters


@pytest.mark.parametrize(("name", "is_headline"), [("bias", True), ("head.bias", False)])
def test_a_parameter_that_no_group_of_its_module_takes_is_a_note(name: str, is_headline: bool) -> None:
    facts = dict.fromkeys(("later", "beside_frozen", "in_flat", "digest"), False) | {"gradient": True, "shapes": [[2]]}
    (found,) = judge_optimized_parameters(training(a_rank(0, [{}], step={"unoptimized": {name: facts}}, world=1)))
    assert f"is in no optimizer, so it never moves: {name}." in found.message
    assert isinstance(found, HeadlineNote) == is_headline


# Objective


def call(terms: float, weight: float, reduction: str = "mean") -> Facts:
    return {
        "function": "cross_entropy", "reduction": reduction, "terms": terms, "weight": weight, "even": True,
        "targets": "",
    }  # fmt: skip


def of_calls(*ranks: Sequence[Facts], batches: bool = True, alone: bool = True, **options: Any) -> RecordedTraining:
    def one_pass(place: int, noted: Facts) -> Facts:
        fetched = {"loader": 0, "pass": 0, "sampler": 0, "batch": place} if batches else None
        return {
            "objective": {"calls": [noted], "alone": alone},
            "batches": {"forwards": [forward([place], fetched)]},
        }

    def passes(calls: Sequence[Facts]) -> list[Facts]:
        return [one_pass(index, noted) for index, noted in enumerate(calls)]

    made = [
        a_rank(i, passes(calls), accumulate=len(calls), process={"parallelism": WRAPPED}, **options)
        for i, calls in enumerate(ranks)
    ]
    return training(*made)


def test_a_sum_over_micro_batches_is_accused() -> None:
    calls = [call(10, 1.0)] * 4
    assert bad(judge_objective(of_calls(calls, calls))) == ["not-divided-by-micro-batches"]


def test_means_that_are_multiplied_by_the_number_of_ranks_are_told() -> None:
    calls = [call(10, 2.0)] * 3
    told, note = judge_objective(of_calls(calls, calls))
    assert told.message == "The loss is 6 × the mean over all 60 terms of cross_entropy."
    assert "multiplied by the number of ranks, and the 3 micro-batches are added up" in note.message


@pytest.mark.parametrize(("times", "terms"), [(1, (10, 30)), (2, (10, 30)), (1, (20, 20))])
@pytest.mark.parametrize("several", [False, True])
def test_losses_that_are_divided_by_the_terms_of_all_ranks_and_averaged_are_told(
    times: int, terms: tuple[int, int], several: bool
) -> None:
    def rank(own: int) -> list[Facts]:
        calls = [call(own, times * own / sum(terms), "sum"), {**call(own, 3.0, "mean"), "function": "l1_loss"}]
        noted = {"objective": {"calls": calls if several else calls[:1], "alone": not several, "means": []}}
        return [{**noted, "batches": {"forwards": [forward([index])]}} for index in range(3)]

    notes = judge_objective(training(*(a_rank(i, rank(own)) for i, own in enumerate(terms))))
    told = [one.message for one in notes if isinstance(one, HeadlineNote)]
    assert [one[:47] for one in told] == (
        ["The weights of a loss on 2 ranks add up to 1, a"] if times == 1 and terms == (10, 30) else []
    )


def test_different_loss_functions_in_separate_passes_are_not_called_one() -> None:
    calls = [call(10, 1.0), {**call(10, 0.7), "function": "mse_loss"}]
    (told,) = judge_objective(of_calls(calls, calls))
    assert told.message.endswith("separate backward passes with different loss functions: cross_entropy, mse_loss.")


def test_gradients_divided_afterwards_are_right() -> None:
    calls = [call(10, 1.0)] * 4
    divided = of_calls(calls, calls, received=(1.0, 2.0))
    (finding,) = judge_objective(divided)
    assert finding.message == "The loss is the mean over all 80 terms of cross_entropy."


def test_a_sum_that_is_clipped_is_accused_all_the_same() -> None:
    calls = [call(10, 1.0)] * 4
    clipped = of_calls(calls, calls, received=(0.5, 1.0), unclipped=(4.0, 8.0))
    assert bad(judge_objective(clipped)) == ["not-divided-by-micro-batches"]


def test_two_losses_of_one_batch_are_not_micro_batches() -> None:
    calls = [call(10, 1.0)] * 2
    assert bad(judge_objective(of_calls(calls, calls, batches=False))) == []


@given(st.lists(st.floats(0.01, 3.0), min_size=2, max_size=5).filter(lambda some: len({round(x, 3) for x in some}) > 1))
def test_losses_of_several_weights_are_never_accused(weights: list[float]) -> None:
    calls = [call(10, weight) for weight in weights]
    assert bad(judge_objective(of_calls(calls, calls))) == []


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=3, max_size=3), min_size=2, max_size=2),
)
def test_a_mean_over_all_tokens_is_recognised(counts: list[list[int]]) -> None:
    total = sum(map(sum, counts))
    ranks = [
        # Like trainers that divide by all ranks' tokens: times the world size, because gradients are averaged.
        [call(count, 2 * count / total, "sum") for count in own]
        for own in counts
    ]
    (finding,) = judge_objective(of_calls(*ranks))
    assert finding.message == f"The loss is the mean over all {total} terms of cross_entropy."


def test_a_mean_of_means_is_told_with_its_distance() -> None:
    # The mean of the gradients (2, 0) and (0, 1) is (1, 0.5). The first has a quarter of all terms: (0.5, 0.75).
    calls, vectors = [call(10, 0.5), call(30, 0.5)], [(1.0, 0.0), (0.0, 0.5)]
    (finding,) = judge_objective(of_calls(calls, calls, vectors=vectors, received=(1.0, 0.5)))
    assert finding.outcome is Outcome.PASSED
    assert finding.message == (
        "The loss is a weighted mean of cross_entropy over 2 micro-batches on each of 2 ranks: a term counts up to 3 × "
        "as much as another. Its gradient differs from that of the mean over all 80 terms by 62.0 %."
    )


def test_the_distance_of_a_mean_of_means_is_not_known_where_something_else_is_added() -> None:
    calls = [call(10, 0.5), call(30, 0.5)]
    (finding,) = judge_objective(of_calls(calls, calls, received=(1.0, 2.0), alone=False))
    assert "The difference between its gradient and that of the mean over all 80 terms is not known." in finding.message


def test_a_sum_over_micro_batches_of_unknown_origin_is_a_note() -> None:
    calls = [call(10, 1.0)] * 4
    summed, told = judge_objective(of_calls(calls, calls, batches=False))
    assert isinstance(summed, HeadlineNote)
    assert summed.message == (
        "The gradient is the sum over 4 micro-batches, not their mean. Divide the loss by 4 if a mean is intended."
    )
    assert told.message == "The loss is 4 × the mean over all 80 terms of cross_entropy."


@pytest.mark.parametrize(
    ("means", "is_told"),
    [
        ([[1.0]], True),
        ([[1.0], [1.0]], True),
        ([[0.25]], False),
        ([[0.25, 1.0]], False),
        ([[1.0], [0.5]], False),
        (None, False),
    ],
)
def test_a_loss_written_by_hand_that_is_not_divided_is_a_note(means: list[list[float]] | None, is_told: bool) -> None:
    passes = [
        {"objective": {"calls": [], "alone": False, "means": means}, "batches": {"forwards": [forward([index])]}}
        for index in range(8)
    ]
    ranks = [a_rank(rank, passes, accumulate=4, process={"parallelism": WRAPPED}) for rank in range(2)]
    assert any(isinstance(one, HeadlineNote) for one in judge_objective(training(*ranks))) == is_told


@pytest.mark.parametrize(
    ("rows", "size", "is_told"), [(range(4), 4, True), ((0, 0, 0, 0), 4, False), (range(4), 1, False)]
)
def test_only_parts_of_a_batch_are_micro_batches(rows: Sequence[int], size: int, is_told: bool) -> None:
    """Several views of a batch, as in adversarial training, are intended."""
    fetched = {"loader": 0, "pass": 0, "sampler": None, "batch": 1}
    passes = [
        {
            "objective": {"calls": [], "alone": False, "means": [[1.0]]},
            "batches": {"forwards": [forward([row], fetched)]},
        }
        for row in rows
    ]
    loaders = {"loaders": [{"loader": 0, "batch_size": size}]}
    ranks = [
        a_rank(rank, passes, accumulate=4, process={"parallelism": WRAPPED, "loaders": loaders}) for rank in range(2)
    ]
    assert any(isinstance(one, HeadlineNote) for one in judge_objective(training(*ranks))) == is_told


def test_several_losses_are_told_with_their_weights() -> None:
    calls = [call(10, 1.0), {**call(10, 0.1), "function": "mse_loss"}]
    passes = [{"objective": {"calls": calls, "alone": False}}] * 3
    (finding,) = judge_objective(training(a_rank(0, passes), a_rank(1, passes)))
    assert finding.message == (
        "The loss of each backward pass contains cross_entropy and 0.1 × mse_loss. Whether it has other terms is not "
        "known."
    )


def test_a_loss_by_hand_that_cannot_be_read_is_not_judged() -> None:
    passes = [{"objective": {"calls": [], "alone": False}}] * 2
    (finding,) = judge_objective(training(a_rank(0, passes), a_rank(1, passes)))
    assert finding.outcome is Outcome.SKIPPED


# Weights


def of_weights(*ranks: Facts, wrapped: bool = True, gradients: Sequence[str] = ("g", "g")) -> RecordedTraining:
    return training(
        *(
            a_rank(
                i,
                [{}],
                step={"weights": {"wrapped": [wrapped], "gradients": [gradients[i]], **facts}},
                process={"parallelism": WRAPPED},
            )
            for i, facts in enumerate(ranks)
        )
    )


def weights(before: str, after: str, at: float = 1.0) -> Facts:
    return {"began": [before], "before": [before], "after": [after], "projections": [[at] * 8]}


def judged(made: RecordedTraining) -> list[Finding]:
    return [*judge_initial_weights(made), *judge_ranks_agree(made)]


def test_equal_weights_pass() -> None:
    assert bad(judged(of_weights(weights("a", "b"), weights("a", "b")))) == []


def test_weights_that_differ_only_by_rounding_are_not_accused() -> None:
    assert bad(judged(of_weights(weights("a", "b"), weights("x", "y", 1 + 2e-7)))) == []


def test_weights_that_are_not_kept_equal_are_not_accused() -> None:
    made = of_weights(weights("a", "b"), weights("x", "y", 2.0), wrapped=False, gradients=("g", "h"))
    assert bad(judged(made)) == []
    assert [one.message for one in judge_ranks_agree(made)] == [
        "ranks hold different weights after 1 of 1 steps; it is not known whether this is intended: nothing keeps "
        "weight equal"
    ]


def test_weights_that_step_with_one_gradient_are_meant_to_be_equal() -> None:
    made = of_weights(weights("a", "b"), weights("x", "y", 2.0), wrapped=False)
    assert bad(judge_initial_weights(made)) == ["not-broadcast"]


def test_an_update_that_differs_is_accused() -> None:
    made = of_weights(weights("a", "b"), weights("a", "c", 2.0))
    assert bad(judged(made)) == ["updates-differ"]


def marked(*findings: Finding) -> list[Finding]:
    return mark_consequences(findings, SCRIPT_RULES, same_cause=False)


def test_a_consequence_without_its_mistake_is_information() -> None:
    made = of_weights(weights("a", "b"), weights("a", "c", 2.0), gradients=("g", "h"))
    (finding,) = judge_ranks_agree(made)
    assert finding.cause == "not-synchronised"
    (harmless,) = marked(finding)
    assert harmless.message.endswith("; this does not count as wrong, because the check gradients has no verdict")
    assert bad([harmless]) == []
    follows, _ = found = marked(finding, Finding("gradients", Outcome.FAILED, ""))
    assert bad(found) == ["not-synchronised", None]
    assert follows.consequence_of == "gradients"


@pytest.mark.parametrize(
    ("cause", "origin"),
    [("rates-differ", "learning-rate"), ("settings-differ-between-ranks", "learning-rate"), ("constant-rate", None)],
)
def test_updates_that_differ_follow_from_rates_that_differ(cause: str, origin: str | None) -> None:
    (parted,) = judge_ranks_agree(of_weights(weights("a", "b"), weights("a", "c", 2.0)))
    follows, _ = marked(parted, Finding("learning-rate", Outcome.FAILED, "", cause=cause))
    assert follows.consequence_of == origin


def test_one_rank_that_skips_is_named() -> None:
    made = of_weights(weights("a", "b"), weights("a", "a", 2.0))
    (step,) = made.ranks[1].steps
    skipped = replace(made.ranks[1], steps=(replace(step, skipped=True),))
    assert bad(judge_ranks_agree(training(made.ranks[0], skipped))) == ["overflow-decided-alone"]


# Buffers and generators


def of_buffers(*values: str, broadcast: bool) -> RecordedTraining:
    def facts(value: str) -> Facts:
        return {"module": 0, "wrapped": True, "broadcast": broadcast, "buffers": {"mean": [value, 1.0]}}

    return training(*(a_rank(i, [{"buffers": {"forwards": [facts(v)]}}]) for i, v in enumerate(values)))


def test_buffers_are_promised_only_where_they_are_broadcast() -> None:
    assert bad(judge_buffers(of_buffers("a", "b", broadcast=True))) == ["buffers-not-broadcast"]
    assert bad(judge_buffers(of_buffers("a", "b", broadcast=False))) == []
    assert bad(judge_buffers(of_buffers("a", "a", broadcast=True))) == []


@pytest.mark.parametrize("noisy", [[], ["Teacher.1"]])
def test_dropout_of_a_teacher_is_told(noisy: list[str]) -> None:
    made = a_rank(0, [{}], step={"generators": {"idle": [], "noisy": noisy}})
    assert [one.message.startswith("a frozen module") for one in judge_generator_states(training(made))] == [
        True
    ] * len(noisy)


@given(st.lists(st.sampled_from("ab"), min_size=2, max_size=2), st.booleans())
def test_random_numbers_are_never_a_failure(states: list[str], drew: bool) -> None:
    forwards = [{"states": {"torch": state}, "drew": ["torch"] if drew else []} for state in states]
    made = training(*(a_rank(i, [{"generators": {"forwards": [one]}}]) for i, one in enumerate(forwards)))
    assert bad(judge_generator_states(made)) == []


@pytest.mark.parametrize("wrapped", [True, False])
def test_other_seeds_are_advised_in_data_parallelism_alone(wrapped: bool) -> None:
    wrapper = {"name": "DistributedDataParallel", "ranks": 2} if wrapped else None
    modules = [{"class": "Model", "layouts": [], "sharded_as_data": False, "wrapper": wrapper}]
    forwards = [{"states": {"torch": "a"}, "drew": ["torch"]}]
    process: Facts = {"parallelism": {"modules": modules}}
    made = training(*(a_rank(rank, [{"generators": {"forwards": forwards}}], process=process) for rank in range(2)))
    (finding,) = judge_generator_states(made)
    assert ("seed each rank with" in finding.message) is wrapped


def test_evidence_without_any_facts_says_nothing_bad() -> None:
    empty = training(*(RecordedRank(i, 2, ()) for i in range(2)))
    bare = training(*(a_rank(i, [{}], process={"parallelism": {}}) for i in range(2)))
    questions = (
        judge_rows_used,
        judge_generator_states,
        judge_buffers,
        judge_initial_weights,
        judge_ranks_agree,
        judge_objective,
    )
    assert [bad(question(made)) for question in questions for made in (empty, bare)] == [[]] * 12


@pytest.mark.parametrize(
    ("hooks", "far", "outcome"),
    [
        ([], 5e-4, Outcome.FAILED),
        (["fp16_compress_hook"], 5e-4, Outcome.PASSED),
        (["own_hook"], 5e-4, Outcome.PASSED),
        (["powerSGD_hook"], 0.05, Outcome.SKIPPED),
    ],
)
def test_a_communication_hook_may_round_gradients_but_not_change_them(
    hooks: list[str], far: float, outcome: Outcome
) -> None:
    rounded = (1 + far, 2 + far / 5)  # no known combination of the ranks' gradients
    process: Facts = {"precision": {"hooks": hooks}}
    ranks = tuple(a_rank(rank, [{}], received=rounded, process=process) for rank in range(2))
    (finding,) = judge_gradients(RecordedTraining(ranks))
    assert finding.outcome is outcome
    assert outcome is not Outcome.SKIPPED or "powerSGD_hook" in finding.message


@pytest.mark.parametrize(("received", "right"), [(0.0, True), (2e-6, False)])
def test_gradients_too_small_for_the_format_of_a_hook_may_vanish(received: float, right: bool) -> None:
    process: Facts = {"precision": {"hooks": ["fp16_compress_hook"]}}
    tiny, small = (2e-8, 2e-8), (received, received)  # float16 has no numbers between 0 and 6e-8
    ranks = tuple(a_rank(rank, [{}], local=tiny, received=small, process=process) for rank in range(2))
    (finding,) = judge_gradients(RecordedTraining(ranks))
    assert (finding.outcome is Outcome.PASSED) is right


def test_a_hook_rounds_the_gradient_of_each_rank_whatever_they_cancel_to() -> None:
    process: Facts = {"precision": {"hooks": ["fp16_compress_hook"]}}
    rounded = 2.0**-11
    ranks = [
        a_rank(rank, [{}], local=(value, value), received=(rounded, rounded), process=process)
        for rank, value in enumerate((1.0, -1.0))
    ]
    (finding,) = judge_gradients(RecordedTraining(tuple(ranks)))
    assert finding.outcome is Outcome.PASSED
    assert (finding.error_x_noise or 0) < 2


@pytest.mark.parametrize(("reduced", "outcome"), [("", Outcome.FAILED), ("bfloat16", Outcome.PASSED)])
def test_gradients_may_round_as_the_format_does_in_which_they_are_reduced(reduced: str, outcome: Outcome) -> None:
    ranks = []
    for rank in range(2):
        made = a_rank(rank, [{}], received=(1.004, 2.0))
        parameters = tuple(replace(one, reduced=reduced) for one in made.steps[0].parameters)
        ranks.append(replace(made, steps=(replace(made.steps[0], parameters=parameters),)))
    (finding,) = judge_gradients(RecordedTraining(tuple(ranks)))
    assert finding.outcome is outcome


@pytest.mark.parametrize(("second", "outcome"), [("b1", Outcome.FAILED), ("c", Outcome.SKIPPED)])
def test_gradients_of_ranks_whose_weights_are_made_equal_are_not_judged(second: str, outcome: Outcome) -> None:
    ranks = []
    for rank in range(2):
        own = (1.0 + rank, 2.0)
        made = a_rank(rank, [{}, {}], local=own, received=own)
        noted = (weights("a", f"b{rank}"), weights(second if second == "c" else f"b{rank}", f"d{rank}"))
        steps = (
            replace(step, facts={"weights": {"wrapped": [True], "gradients": [f"g{rank}"], **facts}})
            for step, facts in zip(made.steps, noted, strict=True)
        )
        ranks.append(replace(made, steps=tuple(steps)))
    (finding,) = judge_gradients(RecordedTraining(tuple(ranks)))
    assert finding.outcome is outcome


def test_gradients_that_are_averaged_after_clipping_follow_from_that() -> None:
    clipped = Finding("clipping", Outcome.FAILED, "", cause="clipped-before-averaging")
    own = Finding("gradients", Outcome.FAILED, "", cause="not-synchronised")
    assert [finding.consequence_of for finding in marked(own, clipped)] == ["clipping", None]
    assert marked(own) == [own]


def test_a_step_before_that_is_unscaled_again_is_named() -> None:
    first, second = (replace(one, passes=(replace(one.passes[0], scale=1024.0),)) for one in a_rank(0, [{}, {}]).steps)
    right = first.passes[0].local / 1024
    steps = (replace(first, received=right), replace(second, received=right + right / 1024))
    (finding,) = judge_gradients(RecordedTraining((RecordedRank(0, 1, steps),)))
    assert finding.cause == "previous-step-not-zeroed"


def test_a_step_before_is_left_in_as_it_was_clipped() -> None:
    first, second = a_rank(0, [{}, {}]).steps
    right = first.passes[0].local
    clipped, both = right / 8, right + right / 8
    steps = (replace(first, received=clipped, unclipped=right), replace(second, received=both / 9, unclipped=both))
    (finding,) = judge_gradients(RecordedTraining((RecordedRank(0, 1, steps),)))
    assert finding.cause == "previous-step-not-zeroed"


@pytest.mark.parametrize("derive", [judged_gradients, model_parts, reduced_parameters, replayed_updates])
def test_what_several_checks_derive_from_a_training_is_computed_once(derive: Callable[[RecordedTraining], Any]) -> None:
    made = of_rows([[1], [2]], [[3], [4]])
    assert derive(made) is derive(made)
    assert derive(made) is not derive(of_rows([[1], [2]], [[3], [4]]))
