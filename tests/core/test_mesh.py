"""A mesh is the arrangement of a tensor's entries, and a backend's contract follows from its mesh."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.backend import BACKENDS, Held, resized
from plumbline.core.mesh import HeldPart, Mesh
from plumbline.core.topology import Topology

SHAPES = st.lists(st.integers(1, 4), max_size=3)


def mesh_of(shape):
    return Mesh(tuple(zip("abc", shape, strict=False)))


@given(SHAPES)
def test_members_are_numbered_as_torch_numbers_the_entries_of_a_tensor(shape):
    mesh, numbers = mesh_of(shape), torch.arange(math.prod(shape)).reshape(shape)
    assert mesh.size == numbers.numel()
    for member in range(mesh.size):
        at = mesh.coordinates(member)
        assert numbers[tuple(at.values())] == member == mesh.member(**at)


@given(SHAPES, st.sets(st.sampled_from("abc")))
def test_groups_divide_the_members_and_differ_along_their_dimensions_alone(shape, along):
    mesh = mesh_of(shape)
    groups = mesh.groups(*along)
    assert sorted(member for group in groups for member in group) == list(range(mesh.size))
    for group in groups:
        assert [mesh.part(member, *along).index for member in group] == list(range(len(group)))
        assert {mesh.part(member, *along).count for member in group} == {len(group)}
        others = [name for name in mesh.names if name not in along]
        assert len({tuple(mesh.coordinates(member)[name] for name in others) for member in group}) == 1


@pytest.mark.parametrize("dimensions", [(("a", 2), ("a", 2)), (("a", 0),)])
def test_what_is_no_mesh_is_refused(dimensions):
    with pytest.raises(ValueError, match="the dimensions of a mesh need different names"):
        Mesh(dimensions)


def test_a_member_that_is_not_there_has_no_coordinates():
    with pytest.raises(ValueError, match="has members 0 to 5, not 6"):
        Mesh.of(replicate=2, shard=3).coordinates(6)


@pytest.mark.parametrize(
    ("backend", "topology", "holding_a_part", "reduced", "normed"),
    [
        ("none", Topology(1, 1), set(), {(0,)}, {(0,)}),
        ("dp", Topology(1, 4), set(), {(0,)}, {(0,)}),
        ("ddp", Topology(2, 2), {Held.SAMPLES}, {(0, 1, 2, 3)}, {(0,), (1,), (2,), (3,)}),
        ("ddp2", Topology(2, 2), {Held.SAMPLES}, {(0, 1)}, {(0,), (1,)}),
        (
            "fsdp", Topology(1, 3),
            {Held.SAMPLES, Held.PARAMETERS, Held.GRADIENTS, Held.OPTIMIZER_STATE}, {(0, 1, 2)}, {(0, 1, 2)},
        ),
        ("zero", Topology(1, 2), {Held.SAMPLES, Held.OPTIMIZER_STATE}, {(0, 1)}, {(0,), (1,)}),
        ("zero2", Topology(1, 2), {Held.SAMPLES, Held.GRADIENTS, Held.OPTIMIZER_STATE}, {(0, 1)}, {(0, 1)}),
    ],
)  # fmt: skip
def test_who_holds_what_and_over_whom_it_is_reduced(backend, topology, holding_a_part, reduced, normed):
    asked = BACKENDS[backend]
    ranks = asked.processes(topology)
    assert {held for held in Held if asked.part(ranks - 1, topology, held) != HeldPart()} == holding_a_part
    assert asked.part(ranks - 1, topology) == HeldPart(ranks - 1, ranks)
    assert set(asked.reduction_groups(topology)) == reduced
    assert set(asked.norm_groups(topology)) == normed
    assert asked.loss_ranks(topology) == tuple(range(ranks))


def test_devices_of_one_process_are_in_the_mesh_of_devices_alone():
    ddp2 = BACKENDS["ddp2"]
    assert ddp2.device_mesh(Topology(2, 4)) == Mesh.of(replicate=2, replica=4)
    assert ddp2.mesh(Topology(2, 4)) == Mesh.of(replicate=2)


def test_each_backend_is_tried_first_on_the_smallest_topology_that_it_fits():
    assert {name: str(backend.smallest) for name, backend in BACKENDS.items()} == {
        "none": "1x1", "auto": "1x2", "dp": "1x2", "ddp": "1x2", "ddp2": "2x2", "fsdp": "1x2", "zero": "1x2",
        "zero2": "1x2",
        "hsdp": "1x4", "tp": "1x2", "ddp+tp": "1x4", "fsdp+tp": "1x4", "sp": "1x2", "ep": "1x2", "pp": "1x2",
        "balanced": "1x2", "hsdp+tp": "1x8", "cp": "1x2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "now", "before"),
    [
        ("ddp", "1x3", "1x2"), ("fsdp", "1x2", "1x3"), ("ddp", "2x2", "2x1"), ("tp", "1x4", "1x3"),
        ("hsdp", "1x4", "1x6@2x3"), ("fsdp+tp", "1x6", "1x6@2x3"), ("fsdp+tp", "1x8@2x4", "1x8@4x2"),
        ("hsdp", "2x2", "2x3@2x3"), ("ddp+tp", "2x4", "2x4@4x2"), ("balanced", "1x2", "1x3"),
    ],
)  # fmt: skip
def test_another_mesh_divides_what_is_divided_otherwise(backend, now, before):
    other = resized(Topology.parse(now), BACKENDS[backend])
    assert str(other) == before
    assert BACKENDS[backend].fits(other)


def test_a_name_is_registered_for_one_backend_only():
    BACKENDS.register(BACKENDS["ddp"])
    with pytest.raises(ValueError, match="backend 'ddp' already exists"):
        BACKENDS.register(type(BACKENDS["ddp"])("ddp"))


def test_stages_are_those_of_pipelines_alone():
    assert {backend.name for backend in BACKENDS.values() if backend.has_stages} == {"pp", "balanced"}
