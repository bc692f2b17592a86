"""Partitions compared with all possible partitions."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbline.trainer import MisconfigurationError
from plumbline.trainer.balanced.partition import StageCosts, partition
from plumbline.trainer.balanced.stage_plan import BlockCost, Profile, Shared, Stage, Travelling


def block(index, seconds, saved=0, state=0):
    return BlockCost(f"layer{index}", seconds, saved, state, 0)


def profile(seconds, saved=None, state=None, ties=(), travelling=()):
    count = len(seconds)
    rows = zip(seconds, saved or [0] * count, state or [0] * count, strict=True)
    return Profile(tuple(block(index, *row) for index, row in enumerate(rows)), ties, travelling)


def every_partition(blocks, stages):
    for inner in combinations(range(1, blocks), stages - 1):
        yield tuple(Stage(first, last) for first, last in pairwise((0, *inner, blocks)))


def stage_seconds(measured, stage):
    return sum(one.seconds for one in measured.blocks[stage.first : stage.last])


def micro_batch_bytes(measured, first, last, returned=True):
    """Return the bytes that blocks keep of one micro-batch, with each travelling tensor found by its location."""
    total = sum(block.saved_bytes for block in measured.blocks[first:last])
    for tensor in measured.travelling:
        keepers = [block for block in tensor.keepers if first <= block < last]
        there = bool(keepers) or (returned and last - 1 in tensor.leaves)
        total += tensor.bytes * (there - len(keepers))
    return total


def stage_bytes(measured, stage, number, stages, micro_batches):
    """Return a stage's peak bytes, with each tied weight found by the blocks that hold it."""
    first, last = stage.first, stage.last
    held = set(range(first, last))
    state = sum(measured.blocks[index].state_bytes for index in held)
    state -= sum(max(0, len(set(tie.blocks) & held) - 1) * tie.bytes for tie in measured.ties)
    arrived = sum(
        tensor.bytes
        for tensor in measured.travelling
        if first in tensor.enters and first not in (*tensor.keepers, *tensor.leaves)
    )
    forward = max(micro_batch_bytes(measured, first, index + 1) for index in held)
    forward = max(forward, micro_batch_bytes(measured, first, first + 1) + arrived)
    backward = []
    for index in held:
        alive = micro_batch_bytes(measured, first, index + 1, returned=index == last - 1)
        if index < last - 1:
            kept = [tensor for tensor in measured.travelling if any(first <= one <= index for one in tensor.keepers)]
            alive += sum(one.bytes for one in measured.travelling if last - 1 in one.leaves and one not in kept)
            alive += measured.blocks[last - 1].output_bytes  # the gradient of the output
        backward.append(alive + measured.blocks[index].transient_bytes)
    passing = max(forward, *backward)
    in_flight = min(stages - number, micro_batches)
    steady = number > 0 and micro_batches > in_flight  # then the last sent gradient still exists during a forward
    sent = measured.blocks[first - 1].output_bytes if steady else 0
    return state + (in_flight - 1) * micro_batch_bytes(measured, first, last) + passing + sent


def objective(measured, stages, micro_batches):
    """Return the seconds by the formula, and the largest peak."""
    seconds = [stage_seconds(measured, stage) for stage in stages]
    peaks = [stage_bytes(measured, stage, s, len(stages), micro_batches) for s, stage in enumerate(stages)]
    return (sum(seconds) + (micro_batches - 1) * max(seconds), max(peaks)), peaks


def by_brute_force(measured, stages, micro_batches, memory):
    """Return the least objective of all partitions that fit, or None."""
    found = []
    for candidate in every_partition(len(measured.blocks), stages):
        value, peaks = objective(measured, candidate, micro_batches)
        if memory is None or all(peak <= limit for peak, limit in zip(peaks, memory, strict=True)):
            found.append(value)
    return min(found, default=None)


def random_case(generator):
    """Draw a case with integer seconds: sums are exact in any order, so ties are exact."""
    blocks = generator.randint(1, 12)
    stages = generator.randint(1, min(blocks, 6))

    def draw(largest):
        return [float(generator.randint(0, largest)) for _ in range(blocks)]

    measured = Profile(
        tuple(
            BlockCost(
                f"layer{index}", seconds, int(saved) + 20, int(state) + 30, int(output), transient_bytes=int(more)
            )
            for index, (seconds, saved, state, output, more) in enumerate(
                zip(draw(generator.choice([3, 20, 1000])), draw(50), draw(100), draw(20), draw(20), strict=True)
            )
        ),
        shares(generator, blocks, 30),
        journeys(generator, blocks, 20),
    )
    limit = generator.choice([None, 200, 300, 400, 600, 1000])
    memory = limit and [limit + generator.randint(-50, 50) for _ in range(stages)]
    return measured, stages, generator.randint(2, 10), memory


def shares(generator, blocks, largest):
    if blocks < 2 or generator.random() < 0.6:
        return ()
    held = sorted(generator.sample(range(blocks), generator.randint(2, min(3, blocks))))
    return (Shared("weight", tuple(held), generator.randint(1, largest)),)


def journeys(generator, blocks, largest):
    """Outputs that a block returns, and that some later blocks receive and pass on; any of them may keep it."""
    found = []
    for index in range(blocks):
        last = generator.randint(index, blocks - 1)
        keepers = [block for block in range(index, last + 1) if generator.random() < 0.5]
        size = generator.randint(1, largest // 4)  # a block may keep several
        found.append(Travelling(size, list(keepers), list(range(index + 1, last + 1)), list(range(index, last))))
    return tuple(found) if generator.random() < 0.6 and blocks <= 4 else tuple(found[:4])


def check(measured, stages, micro_batches, memory):
    """Assert that the partition is optimal, or refused if none fits; return whether one fits."""
    best = by_brute_force(measured, stages, micro_batches, memory)
    if best is None:
        with pytest.raises(MisconfigurationError, match=r"Block \d+ \(layer\d+\) does not fit"):
            partition(measured, stages, micro_batches, memory)
        return False
    found = partition(measured, stages, micro_batches, memory)
    assert len(found) == stages
    value, peaks = objective(measured, found, micro_batches)
    assert value == best
    assert memory is None or all(peak <= limit for peak, limit in zip(peaks, memory, strict=True))
    return True


def test_400_of_400_random_cases_are_optimal():
    generator = random.Random(17)
    fitted = sum(check(*random_case(generator)) for _ in range(400))
    assert 200 < fitted < 400  # both kinds of answer occur


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_case_is_optimal(data):
    blocks = data.draw(st.integers(1, 8))
    stages = data.draw(st.integers(1, blocks))
    numbers = st.lists(st.integers(0, 100), min_size=blocks, max_size=blocks)
    seconds = [float(value) for value in data.draw(numbers)]
    saved, state = data.draw(numbers), data.draw(numbers)
    held = st.sets(st.integers(0, blocks - 1), min_size=1).map(lambda them: tuple(sorted(them)))
    # Shared weights count in each block that has them.
    tied, kept = data.draw(held), data.draw(held)
    measured = profile(
        seconds,
        saved,
        state,
        ties=(Shared("weight", tied, min(state[index] for index in tied)),),
        travelling=(Travelling(min(saved[index] for index in kept), list(kept), list(kept[1:]), list(kept[:1])),),
    )
    limit = st.integers(0, 800)
    memory = data.draw(st.none() | st.lists(limit, min_size=stages, max_size=stages))
    check(measured, stages, data.draw(st.integers(2, 9)), memory)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=9), st.integers(2, 3))
def test_measured_seconds_are_optimal_to_rounding(seconds, stages):
    measured = profile(seconds)

    def slowest(stages_of_it):
        return max(stage_seconds(measured, stage) for stage in stages_of_it)

    found = slowest(partition(measured, stages, 4))
    best = min(map(slowest, every_partition(len(seconds), stages)))
    # Both are sums of at most 9 numbers, in different orders.
    assert found <= best * (1 + 9 * 2**-52)


def test_equal_times_go_to_the_lower_peak():
    # In both partitions, the slowest stage takes 3 seconds; the second block is heavy.
    measured = profile([3.0, 0.0, 3.0], saved=[10, 100, 10])
    assert partition(measured, 2, 4) == (Stage(0, 1), Stage(1, 3))  # stage 0 would keep it twice


def test_a_memory_limit_moves_blocks():
    measured = profile([1.0, 1.0, 1.0, 1.0], state=[100, 100, 10, 10])
    assert partition(measured, 2, 4) == (Stage(0, 2), Stage(2, 4))
    assert partition(measured, 2, 4, [150, 150]) == (Stage(0, 1), Stage(1, 4))


def test_tied_weights_cost_once_a_stage():
    measured = profile([1.0, 1.0, 1.0], state=[50, 10, 50], ties=(Shared("embedding", (0, 2), 50),))
    costs = StageCosts(measured, 1, 1)
    assert costs.peak_bytes(0, 3, 0) == 60
    assert costs.peak_bytes(0, 2, 0) == costs.peak_bytes(1, 3, 0) == 60


def test_fewer_micro_batches_in_flight_on_later_stages():
    measured = profile([1.0, 1.0, 1.0], saved=[10, 10, 10])
    costs = StageCosts(measured, 3, 2)
    assert [costs.peak_bytes(stage, stage + 1, stage) for stage in range(3)] == [20, 20, 10]


def test_the_block_that_fits_nowhere_is_named_with_its_bytes():
    measured = profile([1.0, 1.0, 1.0], saved=[1, 500, 1], state=[10, 1_000, 10])
    with pytest.raises(MisconfigurationError) as refusal:
        partition(measured, 2, 4, [1200, 1400])
    assert "Block 1 (layer1) does not fit on any device: on device 1 it needs 1,500 bytes alone" in str(refusal.value)
    assert "1,400 are allowed" in str(refusal.value)


def test_the_block_that_is_left_over_is_named():
    measured = profile([1.0] * 5, state=[60] * 5)
    with pytest.raises(MisconfigurationError, match=r"Block 2 \(layer2\) does not fit: .* needs 120 bytes"):
        partition(measured, 2, 4, [100, 100])


def test_more_devices_than_blocks_are_refused():
    with pytest.raises(MisconfigurationError, match="2 blocks cannot be distributed over 3 devices"):
        partition(profile([1.0, 2.0]), 3, 4)
