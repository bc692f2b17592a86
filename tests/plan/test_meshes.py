"""A user's mesh selects a backend by its dimensions, and is planned as written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plumbline.core.backend import BACKENDS
from plumbline.core.errors import PlanError
from plumbline.core.topology import Topology
from plumbline.planning.devices import parse_mesh
from plumbline.planning.plan import Matrix, plan
from plumbline.subjects.declare import CAPABILITIES
from tests.plan.test_plan import EVERYTHING


@pytest.mark.parametrize(
    ("text", "backend", "sizes"),
    [
        ("tp=3", "tp", (3,)),
        ("shard=2,tp=4", "fsdp+tp", (2, 4)),
        ("tp=4, shard=2", "fsdp+tp", (2, 4)),
        ("dp=2,tp=2", "ddp+tp", (2, 2)),
        ("replicate=3,shard=2", "hsdp", (3, 2)),
        ("dp=4", "ddp", (4,)),
        ("fsdp=4", "fsdp", (4,)),
        ("dp=2,fsdp=3", "hsdp", (2, 3)),
        ("dp=2,fsdp=3,tp=4", "hsdp+tp", (2, 3, 4)),
    ],
)
def test_a_mesh_is_a_backend_with_sizes(text, backend, sizes):
    chosen = parse_mesh(text)
    assert (chosen.backend, chosen.sizes) == (backend, sizes)


@pytest.mark.parametrize(
    "text", ["", "tp", "tp=1", "tp=x", "tp=2,tp=2", "tp=2,shard", "=2", "tp=-2", "pq=2", "fsdp=2,shard=2"]
)
def test_what_is_no_mesh_is_refused_in_a_sentence(text):
    with pytest.raises(PlanError, match=r"^--mesh .*: (give each dimension once|no backend has these dimensions)"):
        parse_mesh(text)


def test_nothing_but_the_mesh_is_planned():
    matrix = Matrix(gpus=4, workloads=("mlp",), precisions=("32",), meshes=(parse_mesh("shard=2,tp=4"),))
    (cell,) = [planned.cell for planned in plan(matrix, [EVERYTHING])]
    assert (cell.backend, cell.topology) == ("fsdp+tp", Topology(1, 8, (2, 4)))
    assert cell.id == "able-mlp-fsdp+tp-1x8@2x4-32"
    assert Topology.parse(str(cell.topology)) == cell.topology


@pytest.mark.parametrize(("topology", "shape"), [("1x8", (2, 2, 2)), ("1x12", (3, 2, 2)), ("4x2", (2, 2, 2))])
def test_three_dimensions_have_the_devices_of_a_budget(topology, shape):
    asked, topology = BACKENDS["hsdp+tp"], Topology.parse(topology)
    assert asked.mesh(topology).shape == shape
    assert asked.reduction_groups(topology)[0] == tuple(range(0, topology.devices, 2)), "over all but tp"
    assert asked.norm_groups(topology)[0] == (0, 1, 2, 3), "over shards and their parts"
    assert {len(group) for group in asked.replicas(topology)} == {2}


def test_a_mesh_is_divided_among_nodes():
    matrix = Matrix(gpus=4, nodes=2, workloads=("mlp",), precisions=("32",), meshes=(parse_mesh("tp=4"),))
    (cell,) = [planned.cell for planned in plan(matrix, [EVERYTHING])]
    assert cell.topology == Topology(2, 2, (4,))
    with pytest.raises(PlanError, match="4 devices do not divide evenly among 3 nodes"):
        plan(Matrix(gpus=4, nodes=3, meshes=(parse_mesh("tp=4"),)), [EVERYTHING])


def test_ranks_of_a_chosen_mesh_have_its_coordinates():
    asked, topology = BACKENDS["fsdp+tp"], Topology(1, 8, (2, 4))
    assert asked.mesh(topology).coordinates(5) == {"shard": 1, "tp": 1}
    assert asked.replicas(topology) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert asked.part(5, topology).index == 1


@pytest.mark.parametrize(
    ("mesh", "refusal"),
    [
        ("shard=2,tp=2", None),
        ("shard=3,tp=3", "checkpoint-elastic has batches of 27 samples on 9 devices, but 24 on 12"),
        ("dp=5", "checkpoint-elastic has batches of 25 samples on 5 devices, but 24 on 4"),
        ("stage=4", None),
        ("stage=5", "checkpoint-elastic has too few blocks for 5 stages: 4"),
    ],
)
def test_an_elastic_training_fits_both_of_its_meshes_and_has_the_same_batches_there(mesh, refusal):
    able = replace(EVERYTHING, capabilities=CAPABILITIES)
    matrix = Matrix(gpus=4, workloads=("checkpoint-elastic",), precisions=("32",), meshes=(parse_mesh(mesh),))
    assert [one.refusal for one in plan(matrix, [able])] == [refusal]


def test_experts_suffice_for_both_meshes_of_an_elastic_training():
    able = replace(EVERYTHING, capabilities=CAPABILITIES)
    matrix = Matrix(gpus=4, workloads=("checkpoint-experts",), precisions=("32",), meshes=(parse_mesh("ep=5"),))
    assert [one.refusal for one in plan(matrix, [able])] == ["checkpoint-experts has only 4 experts for 5 ranks"]
