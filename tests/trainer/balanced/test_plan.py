"""Plans: what is chosen, refused and shown."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plumbline.trainer import MisconfigurationError
from plumbline.trainer.balanced.partition import partition
from plumbline.trainer.balanced.pipeline_batches import divisors
from plumbline.trainer.balanced.planning import best_plan, memory_limits, plan_stages
from plumbline.trainer.balanced.stage_plan import BlockCost, Profile, Stage, StagePlan

BATCH = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
SVG = "{http://www.w3.org/2000/svg}"


def network():
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])


def made(samples, per_call, seconds=(1.0, 2.0, 1.0), saved=10, state=100):
    """Return a profile for each number of micro-batches, with a time per sample and a time per call."""
    return {
        count: Profile(
            tuple(
                BlockCost(f"layer{index}", one * samples / count + per_call, saved * samples // count, state, 4)
                for index, one in enumerate(seconds)
            )
        )
        for count in divisors(samples)
    }


def test_a_real_module_is_planned(plan):
    found = plan(network(), BATCH, 2, [4])
    assert found.micro_batches == 4
    assert [block.name for block in found.blocks] == ["0", "1", "2", "3", "4"]
    assert found.stages[0].first == 0
    assert found.stages[0].last == found.stages[1].first
    assert found.stages[1].last == 5
    predicted = found.predicted
    assert predicted.step_seconds == found.schedule().makespan >= 4 * max(predicted.stage_seconds)
    assert 0 < predicted.bubble_share < 1
    # 12 / 4 samples of 6 floats: each block but the first keeps its input; two micro-batches at stage 0.
    held = found.stages[0].last
    assert predicted.stage_peak_bytes[0] > held * 42 * 4 * 2 + 2 * (held - 1) * 3 * 6 * 4  # and what the backward needs


def test_the_number_of_micro_batches_is_one_that_divides_the_batch(plan):
    assert 12 % plan(network(), BATCH, 2).micro_batches == 0


def test_stages_and_their_replicas_are_chosen_by_the_simulated_step_and_the_memory():
    profiles = made(24, 0.1, seconds=(1.0, 1.0, 1.0, 1.0), state=100)
    fastest = best_plan(profiles, 4, None, [2, 4])
    steps = {
        (number, count): plan_stages(one, partition(one, number, count * number // 4), count, None, 4 // number)
        for count, one in profiles.items()
        for number in (2, 4)
        if count * number % 4 == 0
    }
    assert fastest.predicted.step_seconds == min(plan.predicted.step_seconds for plan in steps.values())
    assert (fastest.replicas, len(fastest.stages)) == (2, 2)  # a shorter pipeline waits less
    # Each of two stages has two blocks, of 100 bytes of state each.
    narrow = best_plan(profiles, 4, [190] * 4, [2, 4])
    assert (narrow.replicas, len(narrow.stages)) == (1, 4)
    # Stage 1 of both replicas, on devices 1 and 3, has the limit of the smaller one.
    assert best_plan(profiles, 4, [900, 800, 700, 600], [2]).memory == (700, 600)


def test_micro_batches_are_a_multiple_of_the_replicas():
    with pytest.raises(MisconfigurationError, match="3 micro-batches cannot be shared by 2 replicas of 2 stages"):
        best_plan({3: made(24, 0.1)[3]}, 4, None, [2])


@pytest.mark.parametrize("per_call", [0.0, 0.3, 2.0, 50.0])
def test_the_best_number_of_micro_batches_is_chosen(per_call):
    profiles = made(24, per_call)
    cuts = [(Stage(0, cut), Stage(cut, 3)) for cut in (1, 2)]
    steps = {
        count: min(plan_stages(one, cut, count).predicted.step_seconds for cut in cuts)
        for count, one in profiles.items()
    }
    chosen = best_plan(profiles, 2)
    assert chosen.predicted.step_seconds == pytest.approx(min(steps.values()), rel=1e-9)
    assert chosen.predicted.step_seconds == pytest.approx(steps[chosen.micro_batches], rel=1e-9)


def test_costs_of_a_call_make_fewer_micro_batches_better():
    chosen = [best_plan(made(24, per_call), 2).micro_batches for per_call in (0.0, 1.0, 5.0, 1000.0)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] == 24
    assert chosen[-1] == 1


def test_optimizers_steps_are_part_of_what_is_balanced():
    def profile(optimizer):
        heavy = BlockCost("table", 1.0, 10, 100, 4, optimizer_seconds=optimizer)
        return Profile((heavy, *[BlockCost("layer", 1.0, 10, 100, 4)] * 5))

    assert partition(profile(0.0), 2, 4) == (Stage(0, 3), Stage(3, 6))
    stepping = profile(8.0)  # as long as two blocks' forwards and backwards of four micro-batches
    assert partition(stepping, 2, 4) == (Stage(0, 2), Stage(2, 6))
    predicted = plan_stages(stepping, partition(stepping, 2, 4), 4).predicted
    assert predicted.optimizer_seconds == (8.0, 0.0)
    assert predicted.stage_seconds == (2.0, 4.0)
    assert predicted.period_seconds >= 4 * 2.0 + 8.0
    # The first stage finishes last, so nothing else runs while it steps: a shorter step counts more there.
    assert best_plan({4: stepping}, 2).predicted.period_seconds < predicted.period_seconds


def test_a_limit_is_met_with_more_micro_batches():
    profiles = made(24, 1000.0)
    # With two micro-batches the stage of two blocks has 2 × 100 bytes of state and 2 × 120 of activations.
    chosen = best_plan(profiles, 2, [400, 400])
    assert chosen.micro_batches == 3
    assert all(peak <= 400 for peak in chosen.predicted.stage_peak_bytes)
    with pytest.raises(MisconfigurationError, match=r"Block 0 \(layer0\) does not fit on any device"):
        best_plan(profiles, 2, [90, 90])


def test_what_does_not_fit_is_refused(plan):
    with pytest.raises(MisconfigurationError, match=r"5 blocks .*too few for 6 devices"):
        plan(network(), BATCH, 6)
    with pytest.raises(MisconfigurationError, match="does not fit"):
        plan(network(), BATCH, 2, memory=[500] * 2)


def test_a_limit_is_for_each_device():
    cpu = torch.device("cpu")
    assert memory_limits(None, cpu, 2) is None
    assert memory_limits(5, cpu, 2) == (5, 5)
    with pytest.raises(MisconfigurationError, match="device_memory has 1 entries, but there are 2 devices"):
        memory_limits([10**9], cpu, 2)


names = st.text(st.characters(categories=["Lu", "Ll", "Nd", "Po", "Sm"]), min_size=1, max_size=120)


@st.composite
def plans(draw):
    blocks = draw(
        st.lists(
            st.builds(
                BlockCost,
                names,
                st.floats(1e-7, 1e4),
                st.integers(0, 10**12),
                st.integers(0, 10**12),
                st.integers(0, 10**9),
            ),
            min_size=1,
            max_size=8,
        )
    )
    stages = draw(st.integers(1, len(blocks)))
    count = draw(st.integers(1, 12))
    measured = Profile(tuple(blocks))
    limits = draw(st.none() | st.just([10**14] * stages))
    return plan_stages(measured, partition(measured, stages, count), count, limits)


@settings(max_examples=50, deadline=None)
@given(plans())
def test_a_table_has_a_line_a_stage_and_fits_100_columns(found: StagePlan):
    for lines in (found.table().splitlines(), found.table(found.predicted).splitlines()):
        assert max(map(len, lines)) <= 100
        assert [line.split()[0] for line in lines[3:]] == [str(number) for number in range(len(found.stages))]


@settings(max_examples=30, deadline=None)
@given(plans())
def test_a_picture_shows_each_forward_and_backward_within_its_row(found: StagePlan):
    root = ElementTree.fromstring(found.picture())
    width = float(root.get("width"))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.get("class", "").startswith("box") and box.get("y") != "38"]
    assert len(boxes) == 2 * len(found.stages) * found.micro_batches
    assert all(0 <= float(box.get("x")) <= width - float(box.get("width")) for box in boxes)
    rows = {}
    for box in boxes:
        left = float(box.get("x"))
        rows.setdefault(box.get("y"), []).append((left, left + float(box.get("width"))))
    assert len(rows) == len(found.stages)
    for row in rows.values():
        row.sort()
        assert all(left[1] <= right[0] + 0.02 for left, right in pairwise(row))  # written to 0.01


def test_a_table_reads_like_this():
    blocks = tuple(BlockCost(f"layers.{index}", 2e-3, 10**6, 4 * 10**6, 100) for index in range(4))
    found = plan_stages(Profile(blocks), (Stage(0, 3), Stage(3, 4)), 4, [20 * 10**6] * 2)
    assert found.table() == (
        "2 stages, 4 micro-batches: 24 ms a step, 33% bubble\n"
        "\n"
        "stage  blocks                       time  of slowest  peak memory  allowed\n"
        "    0       3  layers.0 … layers.2  6 ms        100%        18 MB    20 MB\n"
        "    1       1  layers.3             2 ms         33%         5 MB    20 MB\n"
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.floats(0, 5)), min_size=2, max_size=7),
    st.integers(1, 6),
    st.none() | st.integers(150, 700),
)
def test_no_block_moved_to_the_next_stage_makes_a_plan_faster(costs, micro_batches, memory):
    blocks = tuple(
        BlockCost(f"layer{index}", seconds, 10, 100, 4, optimizer_seconds=optimizer)
        for index, (seconds, optimizer) in enumerate(costs)
    )
    limits = None if memory is None else [memory] * 2
    try:
        found = best_plan({micro_batches: Profile(blocks)}, 2, limits)
    except MisconfigurationError:
        return
    cut = found.stages[0].last
    for moved in {cut - 1, cut + 1} & set(range(1, len(blocks))):
        other = plan_stages(Profile(blocks), (Stage(0, moved), Stage(moved, len(blocks))), micro_batches)
        if memory is None or max(other.predicted.stage_peak_bytes) <= memory:
            assert other.predicted.period_seconds >= found.predicted.period_seconds * (1 - 1e-6)
    assert memory is None or max(found.predicted.stage_peak_bytes) <= memory


def test_where_a_step_has_few_micro_batches_its_ends_count_too():
    # The bottleneck is smallest with the table alone, but then its optimizer waits for a longer backward.
    table = BlockCost("table", 80.0, 10, 100, 4, optimizer_seconds=105.0)
    layers = [BlockCost("layer", 15.0, 10, 100, 4) for _ in range(8)]
    measured = Profile((table, *layers))
    slowest_is_fastest = plan_stages(measured, partition(measured, 2, 4), 4)
    found = best_plan({4: measured}, 2)
    assert found.predicted.period_seconds <= slowest_is_fastest.predicted.period_seconds
