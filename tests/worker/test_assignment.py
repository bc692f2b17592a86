"""A rank's assignment arrives as it was sent."""

from __future__ import annotations

import json
import pickle

import pytest

from plumbline import current_job
from plumbline.worker.assignment import Assignment
from plumbline.worker.job import Job
from plumbline.worker.recorder.recorder import Recorder


@pytest.mark.parametrize(
    ("backend", "topology", "places"),
    [
        ("none", "1x1", [(0, 0)]),
        ("dp", "1x4", [(0, 0)]),
        ("ddp", "2x2", [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ("ddp2", "2x2", [(0, 0), (1, 0)]),
    ],
)
def test_a_rank_knows_its_node_and_its_place_there(cell_of, backend, topology, places):
    cell = cell_of("mlp", backend, topology)
    sent = [
        Assignment(1, cell, rank, "gloo", ("cpu",), {"RANK": str(rank)}, "e", "l") for rank in range(cell.processes)
    ]
    arrived = [Assignment.from_json(json.loads(json.dumps(assignment.to_json()))) for assignment in sent]
    assert arrived == sent
    assert [(assignment.node_rank, assignment.local_rank) for assignment in arrived] == places


def test_a_whole_node_has_a_part_for_each_rank_beside_its_own(cell_of):
    cell = cell_of("mlp", "ddp", "2x2")
    node = Assignment(
        1, cell, 2, "gloo", ("a", "b"), {}, "there/rank-2.safetensors", "there/rank-2.log", whole_node=True
    )
    own = [node.as_rank(rank) for rank in (2, 3)]
    assert [(one.rank, one.node_rank, one.local_rank, one.devices) for one in own] == [
        (2, 1, 0, ("a",)),
        (3, 1, 1, ("b",)),
    ]
    assert [one.evidence for one in own] == ["there/rank-2.safetensors", "there/rank-3.safetensors"]
    assert [one.log for one in own] == ["there/rank-2.log", "there/rank-3.log"]
    assert own[1].as_rank(3) == own[1]


def test_a_job_does_not_travel_to_processes_that_are_nobodys(cell_of):
    job = Job(Assignment(1, cell_of("mlp", "none", "1x1"), 0, "gloo", ("cpu",), {}, "", ""), Recorder())
    travelling = pickle.dumps(job)
    with pytest.raises(RuntimeError, match="not started by Plumbline"):
        pickle.loads(travelling)


def test_a_process_that_is_no_rank_has_no_job():
    with pytest.raises(RuntimeError, match="not started by Plumbline"):
        current_job()
