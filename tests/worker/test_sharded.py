"""Ranks that shard weights leave the same evidence as ranks with copies, and none of them waits for another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from plumbline.core.errors import TraceError
from plumbline.core.mesh import FlatPart, Part
from plumbline.evidence.read import read_rank, read_trace
from plumbline.evidence.trace import Shard
from plumbline.launch.cell_launch import Settings, launch
from plumbline.worker.recorder.recorder import Recorder
from plumbline.workloads import WORKLOADS

SUBJECTS = Path(__file__).parent / "subjects" / "sharded.py"


@pytest.fixture
def trained(warm_pool, cell_of, tmp_path):
    """Return the trace of one of the trainers, and its folder."""

    def trained(subject, topology, workload="mlp", precision="64", store_above=2**16):
        backend = {"copies": "ddp", "zero": "zero", "flat-parts": "zero"}.get(subject, "fsdp")
        cell = cell_of(workload, backend, topology, precision, subject=subject)
        folder = tmp_path / cell.id
        return launch(warm_pool(SUBJECTS), cell, folder, Settings(600, store_above=store_above)), folder

    return trained


def tensors(trace):
    """Yield each rank's tensors by their location."""
    for rank in trace.ranks:
        for number, step in enumerate(rank.steps):
            for part in ("before", "gradients", "after"):
                for name, value in getattr(step, part).items():
                    yield (rank.rank, number, part, name), value
        for name, value in rank.final.items():
            yield (rank.rank, None, "final", name), value


@pytest.mark.parametrize(
    ("subject", "topology"), [("shards", "1x4"), ("hybrid", "2x2"), ("zero", "1x4"), ("flat-parts", "1x3")]
)
def test_where_every_sum_is_exact_the_evidence_is_that_of_copies_bit_for_bit(subject, topology, trained):
    shared, _ = trained(subject, topology, "linear-exact", "32")
    copies, _ = trained("copies", topology, "linear-exact", "32")
    found, expected = dict(tensors(shared)), dict(tensors(copies))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[place], expected[place]) for place in expected)


@pytest.mark.parametrize("subject", ["shards", "zero", "flat-parts"])
def test_each_rank_has_all_of_every_tensor_where_they_are_not_divisible(subject, trained):
    trace, _ = trained(subject, "1x3")
    shapes = {name: parameter.shape for name, parameter in WORKLOADS["mlp"].model().named_parameters()}
    for rank in trace.ranks:
        assert len(rank.steps) == 6
        for step in rank.steps:
            for part in (step.before, step.gradients, step.after):
                assert {name: value.shape for name, value in part.items()} == shapes
            assert all(value.count_nonzero() for value in step.gradients.values())


def test_a_rank_writes_down_no_more_than_its_shard(trained):
    _, folder = trained("shards", "1x3")
    last = [read_rank(folder / f"rank-{rank}.safetensors").steps[-1].after["layers.2.weight"] for rank in range(3)]
    assert [(part.begin, tuple(part.values.shape)) for part in last] == [
        ((0, 0), (3, 32)), ((3, 0), (3, 32)), ((6, 0), (2, 32)),
    ]  # fmt: skip
    assert torch.equal(torch.cat([part.values for part in last]), read_trace(folder).ranks[0].final["layers.2.weight"])


def test_shards_stay_in_their_ranks_files_whatever_their_size(trained):
    trace, folder = trained("shards", "1x2", store_above=16)
    assert all(isinstance(value, torch.Tensor) for _, value in tensors(trace))
    assert all(isinstance(value, Shard) for value in read_rank(folder / "rank-0.safetensors").final.values())


def test_weights_that_did_not_change_between_steps_are_written_once(trained):
    _, folder = trained("shards", "1x2")
    rank = read_rank(folder / "rank-1.safetensors")
    assert all(later.before is earlier.after for earlier, later in zip(rank.steps, rank.steps[1:], strict=False))
    assert rank.final is rank.steps[-1].after


def test_a_rank_that_steps_alone_is_recorded_and_the_sentence_says_who_is_missing(trained):
    with pytest.raises(TraceError, match=r"layers\.\d\.\w+ \(before, step 0\) .* rank 1 recorded no shard of it"):
        trained("astray", "1x2")


PART = FlatPart(torch.zeros(8), offset=2, length=6, begin=0)


@pytest.mark.parametrize(
    ("name", "part", "said"),
    [
        ("other", PART, "'other': job.model() has no such parameter"),
        ("weight", PART._replace(begin=1), "entries 1 to 7 exceed weight, which has 6"),
        ("weight", PART._replace(offset=3), "weight cannot be entries 3 to 9 of a tensor of [8]"),
        ("weight", PART._replace(tensor=torch.zeros(8, 1)), "weight cannot be entries 2 to 8 of a tensor of [8, 1]"),
        ("weight", PART._replace(length=-1), "entries 0 to -1 exceed weight"),
        ("weight", Part(torch.zeros(2, 2), (0, 2)), "a block of [2, 2] at [0, 2] exceeds weight, which is [2, 3]"),
        ("weight", Part(torch.zeros(2), (0,)), "a block of [2] at [0] exceeds weight, which is [2, 3]"),
    ],
)
def test_a_part_that_cannot_be_one_is_an_error_that_names_it(name, part, said):
    recorder = Recorder()
    recorder.watch(nn.Linear(3, 2, bias=False))
    with pytest.raises(TraceError) as raised:
        recorder.parts({name: part}, range(2))
    assert said in str(raised.value)


@pytest.mark.parametrize("topology", ["1x2", "1x4"])
def test_blocks_that_are_declared_are_put_together(topology, trained):
    """Columns, tiles and rows of weights, and empty parts: with 4 ranks, two have none of the bias."""
    shared, _ = trained("tiles", topology)
    copies, _ = trained("copies", topology)
    found, expected = dict(tensors(shared)), dict(tensors(copies))
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[place], expected[place], rtol=1e-12, atol=1e-15) for place in expected)


def test_a_part_that_nobody_declared_is_refused_and_the_sentence_says_what_to_do(trained):
    trace, _ = trained("undeclared-tiles", "1x2")
    for rank in trace.ranks:
        assert "layers.0.weight is [32, 8] on this rank and [32, 16] in job.model()" in rank.error
        assert "job.parts" in rank.error


@pytest.mark.parametrize("precision", ["64", "32"], ids=["pieces with names", "vectors without"])
def test_weights_that_cannot_be_read_are_no_mistake_of_the_trainers(precision, trained):
    trace, _ = trained("flat", "1x2", precision=precision)
    assert all("fully_shard (FSDP2)" in rank.error for rank in trace.ranks)
