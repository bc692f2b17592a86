"""What a rank is told arrives as it was sent."""

from __future__ import annotations

import json

import pytest

from harness import current_job
from harness.worker.assignment import Assignment


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


def test_a_process_that_is_no_rank_has_no_job():
    with pytest.raises(RuntimeError, match="not started by Plumbline"):
        current_job()
