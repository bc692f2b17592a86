"""Shards of ranks are assembled; shards that do not fit raise an error with a message, never give a wrong tensor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.errors import TraceError
from plumbline.core.outcome import Outcome
from plumbline.evidence.read import read_trace, whole_tensors
from plumbline.evidence.trace import Exit, RankTrace, Shard, Step, Trace
from plumbline.evidence.trace_file import write_rank

SHAPE = (5, 3)

joined = partial(whole_tensors, store=Path("no tensor is stored"))


@st.composite
def placements(draw):
    """A tensor's shape, the mesh over which it is sharded, and the tensor dimension for each mesh dimension."""
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple))
    dimensions = st.none() | st.integers(0, len(shape) - 1)  # None: replicated
    return shape, mesh, tuple(draw(dimensions) for _ in mesh)


def shared_out(whole, mesh, dimensions):
    """Return each rank's shard: divided along each mesh dimension like torch.chunk, or replicated."""
    everybody = list(product(*map(range, mesh)))
    shards = []
    for place in everybody:
        values, begin = whole, [0] * whole.dim()
        for coordinate, size, dimension in zip(place, mesh, dimensions, strict=True):
            if dimension is not None:
                chunk = -(-values.shape[dimension] // size)
                first = min(coordinate * chunk, values.shape[dimension])
                values = values.narrow(dimension, first, min(chunk, values.shape[dimension] - first))
                begin[dimension] += first
        copy = [
            rank
            for rank, other in enumerate(everybody)
            if all(o == p for o, p, dimension in zip(other, place, dimensions, strict=True) if dimension is None)
        ]
        shards.append(Shard(values.clone(), tuple(begin), tuple(whole.shape), tuple(copy)))
    return shards


def launch(*ranks, **settings):
    """Return a launch whose ranks took one step each, with these as all its tensors."""
    traces = []
    for rank, held in enumerate(ranks):
        step = Step((), held, dict(held), dict(held), (0.1,))
        traces.append(RankTrace(rank, len(ranks), (step,), final=step.after, **settings))
    return Trace(tuple(traces))


def rows(count=3, of=None):
    """Return a tensor of ``SHAPE``, and the rows that each rank holds."""
    whole = torch.arange(float(prod(SHAPE))).view(SHAPE) if of is None else of
    return whole, shared_out(whole, (count,), (0,))


@given(placements(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_every_rank_sees_the_whole(placement, dtype):
    shape, mesh, dimensions = placement
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    shards = shared_out(whole, mesh, dimensions)
    seen = joined(launch(*({"weight": shard, "bias": torch.ones(2)} for shard in shards)))
    for rank, shard in zip(seen.ranks, shards, strict=True):
        block = (shard.begin, tuple(shard.values.shape))
        assert rank.blocks == ({"weight": block} if block[1] != shape else {})
        (step,) = rank.steps
        for tensors in (step.before, step.gradients, step.after, rank.final):
            assert torch.equal(tensors["weight"], whole)
            assert tensors["weight"].dtype == dtype
            assert torch.equal(tensors["bias"], torch.ones(2))


@st.composite
def runs(draw):
    """A tensor's shape, and the boundaries of the ranks' runs of its flattened entries; runs may be empty."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    cuts = draw(st.lists(st.integers(0, prod(shape)), min_size=1, max_size=4).map(sorted))
    return shape, [0, *cuts, prod(shape)]


@given(runs())
def test_every_rank_sees_the_whole_of_what_was_flattened(divided):
    shape, cuts = divided
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ranks = tuple(range(len(cuts) - 1))
    parts = [Shard(whole.view(-1)[cuts[rank] : cuts[rank + 1]], (cuts[rank],), shape, ranks) for rank in ranks]
    seen = joined(launch(*({"weight": part} for part in parts)))
    assert all(torch.equal(rank.final["weight"], whole) for rank in seen.ranks)


def test_copies_that_differ_are_seen_as_they_are():
    whole, _ = rows()
    one, other = shared_out(whole, (2, 2), (None, 0)), shared_out(whole + 1, (2, 2), (None, 0))
    seen = joined(launch(*({"weight": shard} for shard in [*one[:2], *other[2:]])))
    assert [torch.equal(rank.final["weight"], whole) for rank in seen.ranks] == [True, True, False, False]
    assert all(torch.equal(rank.final["weight"], whole + 1) for rank in seen.ranks[2:])


def test_what_did_not_change_between_steps_stays_one_object():
    _, shards = rows()
    traces = []
    for rank, shard in enumerate(shards):
        first = Step((), {"weight": shard}, {}, {"weight": replace(shard, values=shard.values + 1)}, ())
        traces.append(RankTrace(rank, 3, (first, replace(first, before=first.after)), final=first.after))
    for rank in joined(Trace(tuple(traces))).ranks:
        assert rank.steps[1].before is rank.steps[0].after
        assert rank.final is rank.steps[1].after


def test_evidence_without_shards_is_left_alone():
    trace = launch({"weight": torch.ones(2)}, {"weight": torch.zeros(2)})
    assert joined(trace) is trace


def test_evidence_that_is_not_whole_is_left_to_what_broke_it():
    _, shards = rows()
    held = [{"weight": shard} for shard in shards]
    raised = launch(held[0], {}, held[2], error="ValueError: no", failed_at=1.0)
    assert joined(raised) is raised
    stopped = joined(launch(*held, error="ValueError: no", failed_at=1.0))
    assert all(step.before["weight"].shape == SHAPE for rank in stopped.ranks for step in rank.steps)
    died = replace(launch(*held[:2]), exits={2: Exit(Outcome.CRASHED, "killed by signal 9")})
    assert joined(died) is died


def broken(change):
    """Return three ranks' shards, which ``change`` makes inconsistent."""
    _, shards = rows()
    return [{"weight": shard} for shard in change(shards)]


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (broken(lambda shards: shards[:2]), "rank 2 recorded no shard of it"),
        ([*broken(lambda shards: shards[:2]), {}], "rank 2 recorded no shard of it"),
        ([*broken(lambda shards: shards[:2]), {"weight": torch.ones(SHAPE)}], "rank 2 recorded no shard of it"),
        (broken(lambda s: [s[0], replace(s[1], begin=(1, 0)), s[2]]), "3 of its 15 entries are in several"),
        (broken(lambda s: [s[0], replace(s[1], values=torch.ones(1, 3)), s[2]]), "3 of its 15 entries are in no shard"),
        (broken(lambda s: [replace(shard, shape=(10**12, 3)) for shard in s]), "entries are in no shard"),
        (broken(lambda s: [s[0], replace(s[1], values=torch.ones(3, 3)), s[2]]), "3 of its 15 entries are in several"),
        (broken(lambda s: [s[0], replace(s[1], begin=(9, 0)), s[2]]), "exceeds its shape"),
        (broken(lambda s: [s[0], replace(s[1], begin=(2,)), s[2]]), "[5, 3] float32, flattened"),
        (broken(lambda s: [s[0], replace(s[1], begin=(-2, 0)), s[2]]), "exceeds its shape"),
        (broken(lambda s: [s[0], replace(s[1], values=s[1].values.double()), s[2]]), "[5, 3] float64"),
        (broken(lambda s: [s[0], replace(s[1], shape=(5, 4)), s[2]]), "[5, 4] float32"),
        (broken(lambda s: [s[0], replace(s[1], ranks=()), s[2]]), "rank 1 holds neither all of it nor a block"),
        (broken(lambda s: [replace(s[0], ranks=(1, 2)), *s[1:]]), "rank 0 holds neither all of it nor a block"),
    ],
)
def test_shards_that_do_not_fit_are_an_error_that_names_the_parameter(held, said):
    with pytest.raises(TraceError) as raised:
        joined(launch(*held))
    assert "weight (before, step 0)" in str(raised.value)
    assert said in str(raised.value)


def test_a_rank_that_took_fewer_steps_left_no_part_of_the_others():
    _, shards = rows()
    trace = launch(*({"weight": shard} for shard in shards))
    last = trace.ranks[2]
    fewer = replace(trace, ranks=(*trace.ranks[:2], replace(last, steps=())))
    with pytest.raises(TraceError, match="rank 2 recorded no shard of it"):
        joined(fewer)


def test_shards_travel_and_are_put_together_when_they_are_read(tmp_path):
    whole, shards = rows()
    for rank in launch(*({"weight": shard} for shard in shards)).ranks:
        write_rank(str(tmp_path / f"rank-{rank.rank}.safetensors"), rank)
    for rank in read_trace(tmp_path).ranks:
        assert torch.equal(rank.final["weight"], whole)
        assert rank.steps[0].after is rank.final
