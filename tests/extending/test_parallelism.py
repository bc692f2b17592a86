"""The contract of each parallelism is a mesh, as one object: hsdp, tp, fsdp+tp, pp, ep, cp."""

from __future__ import annotations

import pytest

from plumbline.core.backend import BACKENDS, MODEL, Backend, Dimension, Held, devices, gpus, nodes
from plumbline.core.mesh import HeldPart, Mesh
from plumbline.core.topology import Topology
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.worker.assignment import Assignment
from plumbline.worker.job import Job
from plumbline.worker.recorder.recorder import Recorder
from plumbline.workloads import WORKLOADS

SAMPLES = frozenset({Held.SAMPLES})
NODES_OF_TWO = Topology(2, 2)

HSDP = Backend("hsdp", (Dimension("replicate", nodes), Dimension("shard", gpus, MODEL | SAMPLES)), "HSDP", opt_in=True)
TP = Backend("tp", (Dimension("tensor", devices, MODEL),), "TP", opt_in=True)
FSDP_TP = Backend(
    "fsdp+tp",
    (
        Dimension("shard", lambda topology: topology.devices // 2, MODEL | SAMPLES),
        Dimension("tensor", lambda _: 2, MODEL),
    ),
    "FSDP+TP",
    opt_in=True,
)
DDP_TP = Backend("ddp+tp", (Dimension("replicate", nodes), Dimension("tensor", gpus, MODEL)), "DDP+TP", opt_in=True)
PP = Backend("pp", (Dimension("stage", devices, MODEL),), "PP", opt_in=True)
EP = Backend("ep", (Dimension("expert", devices, SAMPLES | {Held.EXPERTS}),), "EP", opt_in=True)
CP = Backend("cp", (Dimension("sequence", devices, frozenset({Held.SEQUENCE})),), "CP", opt_in=True)


def test_hybrid_shards_lie_inside_of_a_node_and_replicas_across():
    assert HSDP.mesh(NODES_OF_TWO) == Mesh.of(replicate=2, shard=2)
    assert [HSDP.part(rank, NODES_OF_TWO, Held.PARAMETERS).index for rank in range(4)] == [0, 1, 0, 1]
    assert [HSDP.part(rank, NODES_OF_TWO).index for rank in range(4)] == [0, 1, 2, 3]
    assert HSDP.reduction_groups(NODES_OF_TWO) == ((0, 1, 2, 3),)
    assert HSDP.norm_groups(NODES_OF_TWO) == ((0, 1), (2, 3)), "each replica has the whole gradient once"
    assert HSDP.smallest == NODES_OF_TWO


def test_tensor_parallel_ranks_see_the_same_samples_and_hold_parts_of_each_tensor():
    topology = Topology(1, 4)
    assert {TP.part(rank, topology) for rank in range(4)} == {HeldPart(0, 1)}
    assert [TP.part(rank, topology, Held.PARAMETERS) for rank in range(4)] == [HeldPart(rank, 4) for rank in range(4)]
    assert TP.reduction_groups(topology) == ((0,), (1,), (2,), (3,)), "nothing is averaged: one replica"
    assert TP.norm_groups(topology) == ((0, 1, 2, 3),)
    assert TP.loss_ranks(topology) == (0,), "one loss, that of one device"


def test_shards_and_parts_of_tensors_are_two_dimensions():
    topology = Topology(1, 8)
    assert FSDP_TP.mesh(topology) == Mesh.of(shard=4, tensor=2)
    assert [FSDP_TP.part(rank, topology).index for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [FSDP_TP.part(rank, topology, Held.PARAMETERS) for rank in range(8)] == [
        HeldPart(rank, 8) for rank in range(8)
    ]
    assert FSDP_TP.reduction_groups(topology) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert FSDP_TP.norm_groups(topology) == (tuple(range(8)),)
    assert FSDP_TP.loss_ranks(topology) == (0, 2, 4, 6)
    assert FSDP_TP.smallest == Topology(1, 4)
    assert not FSDP_TP.fits(Topology(1, 3))
    assert not FSDP_TP.fits(Topology(1, 5)), "a device would be left over"


def test_stages_see_all_samples_and_have_layers_of_their_own():
    topology = Topology(1, 3)
    assert PP.part(2, topology) == HeldPart(0, 1)
    assert PP.part(2, topology, Held.PARAMETERS) == HeldPart(2, 3)
    assert PP.norm_groups(topology) == ((0, 1, 2),)
    assert PP.loss_ranks(topology) == (0,)


def test_experts_are_in_parts_and_all_else_is_as_with_ddp():
    topology = Topology(1, 2)
    ddp = BACKENDS["ddp"]
    assert EP.reduction_groups(topology) == ddp.reduction_groups(topology)
    assert EP.loss_ranks(topology) == ddp.loss_ranks(topology)
    assert EP.part(1, topology, Held.PARAMETERS) == ddp.part(1, topology, Held.PARAMETERS)
    assert EP.norm_groups(topology) == ddp.norm_groups(topology), "what is replicated counts once"
    assert EP.part(1, topology, Held.EXPERTS) == HeldPart(1, 2)
    assert EP.norm_groups(topology, Held.EXPERTS) == ((0, 1),)


def test_parts_of_a_sequence_are_of_one_loss_and_their_gradients_are_reduced():
    topology = Topology(1, 2)
    assert CP.part(1, topology) == HeldPart(0, 1)
    assert CP.part(1, topology, Held.SEQUENCE) == HeldPart(1, 2)
    assert CP.reduction_groups(topology) == ((0, 1),)
    assert CP.loss_ranks(topology) == (0,)


@pytest.mark.parametrize(("backend", "batch_size"), [(TP, 24), (DDP_TP, 12), (HSDP, 6), (CP, 24)])
def test_ranks_that_see_the_same_samples_draw_as_many_as_one_alone(backend, batch_size, monkeypatch, cell_of):
    monkeypatch.setitem(BACKENDS, backend.name, backend)
    cell = cell_of("mlp", backend.name, "2x2")
    job = Job(Assignment(1, cell, 3, "gloo", ("cpu",), {}, "", ""), Recorder())
    assert (job.world_size, job.global_batch_size, job.batch_size) == (4, 24, batch_size)


@pytest.mark.parametrize(("backend", "groups"), [(DDP_TP, [(0, 1), (2, 3)]), (HSDP, [(0,), (1,), (2,), (3,)])])
def test_the_judge_takes_one_loss_of_each_set_of_samples(backend, groups, monkeypatch, cell_of):
    """Ranks of a tensor-parallel group report the same samples; the mean is over groups, like ddp over dp."""
    monkeypatch.setitem(BACKENDS, backend.name, backend)
    samples = {rank: (2 * index, 2 * index + 1) for index, group in enumerate(groups) for rank in group}
    ranks = [
        RankTrace(rank, 4, (Step((MicroBatch((samples[rank],), samples[rank]),), {}, {}, {}, ()),)) for rank in range(4)
    ]
    analysis = TraceAnalysis(Trace(tuple(ranks)), WORKLOADS["mlp"], cell_of("mlp", backend.name, "2x2"))
    assert analysis.layouts[0] == (tuple((samples[group[0]],) for group in groups),)
