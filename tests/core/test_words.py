"""Topologies, backends, outcomes: their contracts with other modules."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.backend import BACKENDS, declared_for
from plumbline.core.outcome import Outcome, worst
from plumbline.core.precision import PRECISIONS
from plumbline.core.topology import Topology

TOPOLOGIES = st.builds(Topology, st.integers(1, 16), st.integers(1, 16))


@pytest.mark.parametrize(("nodes", "gpus"), [(0, 1), (1, 0), (-1, 2)])
def test_a_topology_has_a_device(nodes, gpus):
    with pytest.raises(ValueError, match="at least one"):
        Topology(nodes, gpus)


@given(TOPOLOGIES)
def test_ranks_times_devices_are_the_topology(topology):
    for backend in BACKENDS.values():
        if backend.fits(topology):
            assert backend.processes(topology) * backend.devices_per_process(topology) == topology.devices
            assert backend.processes(topology) == topology.num_nodes * backend.processes_per_node(topology)


@given(TOPOLOGIES)
def test_every_topology_has_a_backend(topology):
    assert any(backend.fits(topology) for backend in BACKENDS.values())


@given(TOPOLOGIES)
def test_one_device_is_for_no_backend_alone(topology):
    fitting = {name for name, backend in BACKENDS.items() if backend.fits(topology)}
    assert ("none" in fitting) == (topology.devices == 1)
    if "none" in fitting:
        assert fitting == {"none"}


ONE_DIMENSION = {"ddp", "fsdp", "zero", "zero2", "tp", "sp", "cp", "ep", "pp", "balanced"}
TWO_DIMENSIONS = {"hsdp", "ddp+tp", "fsdp+tp"}


@pytest.mark.parametrize(
    ("topology", "fitting"),
    [
        (Topology(1, 1), {"none"}),
        (Topology(1, 4), {"auto", "dp", *ONE_DIMENSION, *TWO_DIMENSIONS}),
        (Topology(2, 1), ONE_DIMENSION),
        (Topology(2, 4), {"ddp2", *ONE_DIMENSION, *TWO_DIMENSIONS}),
        (Topology(4, 2), {"ddp2", *ONE_DIMENSION, *TWO_DIMENSIONS, "hsdp+tp"}),
        (Topology(1, 12), {"auto", "dp", *ONE_DIMENSION, *TWO_DIMENSIONS, "hsdp+tp"}),
        (Topology(1, 8, (2, 2, 2)), {"hsdp+tp"}),
        (Topology(1, 3), {"auto", "dp", *ONE_DIMENSION}),
        (Topology(1, 8, (2, 4)), {"balanced", *TWO_DIMENSIONS}),
    ],
)
def test_a_backend_is_tried_where_it_means_something(topology, fitting):
    assert {name for name, backend in BACKENDS.items() if backend.fits(topology)} == fitting


@pytest.mark.parametrize(
    ("backend", "processes", "devices"),
    [("ddp", 8, 1), ("fsdp", 8, 1), ("zero", 8, 1), ("pp", 8, 1), ("balanced", 8, 1), ("ddp2", 2, 4)],
)
def test_who_drives_what_on_two_nodes_of_four(backend, processes, devices):
    assert BACKENDS[backend].processes(Topology(2, 4)) == processes
    assert BACKENDS[backend].devices_per_process(Topology(2, 4)) == devices


def test_what_a_trainer_declares_for_a_backend_is_found_and_else_what_it_declared_first():
    @dataclass
    class Declared:
        name: str
        backends: list[str]

    other, plain, sharded = Declared("b", ["fsdp"]), Declared("a", ["none", "ddp"]), Declared("a", ["fsdp"])
    declared = [other, plain, sharded]
    assert declared_for("a", "fsdp", declared) is sharded
    assert declared_for("a", "ddp", declared) is plain
    assert declared_for("a", "zero", declared) is plain


def test_a_cell_is_as_bad_as_its_worst_finding():
    assert worst([Outcome.PASSED, Outcome.DEVIATES]) is Outcome.DEVIATES
    assert worst([Outcome.FAILED, Outcome.DEVIATES, Outcome.PASSED]) is Outcome.FAILED
    assert worst([Outcome.FAILED, Outcome.ERRORED]) is Outcome.ERRORED


@given(st.lists(st.sampled_from(Outcome), min_size=1))
def test_the_worst_is_bad_if_any_is(outcomes):
    assert worst(outcomes) in outcomes
    assert worst(outcomes).is_bad == any(outcome.is_bad for outcome in outcomes)
    if worst(outcomes) is Outcome.PASSED:
        assert set(outcomes) <= {Outcome.PASSED, Outcome.SKIPPED, Outcome.UNSUPPORTED}


def test_no_finding_is_no_outcome():
    with pytest.raises(ValueError, match="empty"):
        worst([])


def test_only_float16_is_scaled():
    assert [name for name, precision in PRECISIONS.items() if precision.scaled] == ["16"]
