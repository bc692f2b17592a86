"""Which cells are measured: few enough to wait for, and enough to see the effect of several devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.backend import BACKENDS
from plumbline.core.errors import PlanError
from plumbline.core.topology import Topology
from plumbline.planning.declaration import Declaration
from plumbline.planning.plan import Matrix, plan
from plumbline.workloads import PERFORMANCE, WORKLOADS

EVERYTHING = ("64", "32", "16", "bf16")


def able(**settings):
    every = dict.fromkeys(("cpu", "cuda"), EVERYTHING)
    return Declaration("able", "able.py", tuple(BACKENDS), every, frozenset(), **settings)


def cells(gpus, nodes=None, **wanted):
    return [planned.cell for planned in plan(Matrix(gpus, nodes, **wanted), [able()], PERFORMANCE)]


@given(st.integers(1, 32), st.none() | st.integers(1, 8))
def test_no_cell_is_above_the_budget_and_one_device_is_always_there(gpus, nodes):
    found = cells(gpus, nodes)
    assert all(cell.topology.devices <= gpus * (nodes or 1) for cell in found)
    assert len(set(found)) == len(found)
    for name, workload in PERFORMANCE.items():
        here = [cell for cell in found if cell.workload == name]
        assert here[0].topology == Topology(1, 1), "what scales does so from one device, which comes first"
        assert {cell.precision for cell in here} <= set(workload.precisions)


def test_eight_devices_are_measured_at_one_two_four_and_eight_and_as_two_nodes():
    found = [cell for cell in cells(8) if cell.workload == "perf-gpt" and cell.precision == "32"]
    places = {backend: [str(c.topology) for c in found if c.backend == backend] for backend in ("dp", "ddp", "ddp2")}
    assert places == {"dp": ["1x2", "1x4", "1x8"], "ddp": ["1x2", "1x4", "1x8", "2x4"], "ddp2": ["2x4"]}


def test_other_precisions_are_measured_once_for_each_backend():
    found = [cell for cell in cells(8, precisions=("32", "16", "bf16")) if cell.precision == "16"]
    assert len({cell.backend for cell in found}) == len(found)


def test_conformance_and_speed_do_not_mix():
    both = Matrix(2, workloads=("mlp", "perf-mlp"))
    assert {planned.cell.workload for planned in plan(both, [able()])} == {"mlp"}
    assert {planned.cell.workload for planned in plan(both, [able()], PERFORMANCE)} == {"perf-mlp"}
    assert not {planned.cell.workload for planned in plan(Matrix(2), [able()])} - WORKLOADS.keys()


def test_a_misspelt_workload_is_answered():
    with pytest.raises(PlanError, match="did you mean 'perf-mlp'"):
        plan(Matrix(1, workloads=("perf-mpl",)), [able()], PERFORMANCE)


def test_what_starts_its_own_ranks_is_refused_with_a_sentence():
    for planned in plan(Matrix(2), [able(launch="node")], PERFORMANCE):
        assert "starts its own ranks" in planned.refusal
    assert not [one for one in plan(Matrix(1), [able(launch="node")]) if "by itself" in (one.refusal or "")]
