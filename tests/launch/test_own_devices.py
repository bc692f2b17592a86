"""Each node of a cell sees only its own CUDA devices, even if it is the only node."""

from __future__ import annotations

import pytest

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.launch.this_machine import own_devices


@pytest.mark.parametrize(
    ("visible", "topology", "backend", "seen"),
    [
        (None, "1x1", "none", {0: "0"}),
        (None, "1x2", "dp", {0: "0,1"}),
        (None, "1x2", "ddp", {0: "0,1", 1: "0,1"}),
        (None, "2x2", "ddp", {0: "0,1", 1: "0,1", 2: "2,3", 3: "2,3"}),
        ("5,4,7,6", "2x2", "ddp2", {0: "5,4", 1: "7,6"}),
        ("GPU-b,GPU-a", "1x1", "none", {0: "GPU-b"}),
    ],
)
def test_a_node_sees_its_own_devices(monkeypatch, visible, topology, backend, seen):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cell = Cell("any", "mlp", backend, Topology.parse(topology), "32", "cuda")
    told = {rank: own_devices(cell, rank, oversubscribe=False) for rank in range(cell.processes)}
    assert {rank: variables["CUDA_VISIBLE_DEVICES"] for rank, variables in told.items()} == seen
    # Device numbers are nvidia-smi's, unless the user has set others.
    assert all(("CUDA_DEVICE_ORDER" in variables) == (visible is None) for variables in told.values())


def test_ranks_that_share_devices_see_all_of_them():
    assert own_devices(Cell("any", "mlp", "ddp", Topology(1, 8), "32", "cuda"), 0, oversubscribe=True) == {}


def test_simulated_devices_need_nothing():
    assert own_devices(Cell("any", "mlp", "ddp", Topology(2, 2), "32", "cpu"), 0, oversubscribe=False) == {}
