"""The chunks of a pipeline are seen whichever trainer computes them, and its bubble is derived from them."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise

import pytest
import torch
from torch import nn

from plumbline.benchmark.launch_metrics import bubble, samples_of, timeline
from plumbline.benchmark.timed_launch import LaunchSample, LaunchTimings, TimedLaunch
from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.evidence.timing import BACKWARD, FORWARD, WEIGHTS, Chunk, RankTiming, Round
from plumbline.launch.cell_launch import Settings
from plumbline.worker.timing.stopwatch import PipelineChunks

NOTHING = Round(0.0, (0.0,), (1.0,), ())


class Problem:
    """Computes the loss of a batch."""

    def loss(self, outputs, batch):
        return outputs.sum()


@pytest.fixture
def followed():
    """Chunks that are followed during a test, by a clock that counts its readings."""
    moments = iter(range(1000))
    chunks = PipelineChunks(lambda: next(moments), Problem)
    originals = nn.Module.__call__, Problem.loss, torch.autograd.backward, torch.autograd.grad
    chunks.start()
    yield chunks
    chunks.stop()
    assert (nn.Module.__call__, Problem.loss, torch.autograd.backward, torch.autograd.grad) == originals


def whole(chunks):
    """Return the chunks of the single step as kind, stage and micro-batch."""
    chunks.end_step()
    (step,) = chunks.steps(lambda marks: tuple(map(float, marks)))
    assert [chunk.begun for chunk in step] == sorted(chunk.begun for chunk in step)
    assert all(chunk.begun < chunk.ended for chunk in step)
    return [(chunk.kind, chunk.stage, chunk.micro_batch) for chunk in step]


def test_a_backward_is_known_by_the_forward_whose_tensors_it_reads(followed):
    first, last = (nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
    batches = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    outputs = [first(batch) for batch in batches]
    arrived = [output.detach().requires_grad_() for output in outputs]
    losses = [Problem().loss(last(one), None) for one in arrived]
    for number in (1, 0):  # not in the order of the forwards
        losses[number].backward()
        torch.autograd.backward(outputs[number], arrived[number].grad)
    forwards = [(FORWARD, stage, number) for stage in (0, 1) for number in (0, 1)]
    assert whole(followed) == [*forwards, *((BACKWARD, stage, number) for number in (1, 0) for stage in (1, 0))]


def test_gradients_of_weights_that_are_put_off_are_one_chunk(followed):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    batch = torch.randn(2, 3, requires_grad=True)
    loss = layers(batch).square().sum()
    torch.autograd.grad(loss, batch, retain_graph=True)
    for layer in layers:
        torch.autograd.grad(loss, layer.weight, retain_graph=True)
    assert whole(followed) == [(FORWARD, 0, 0), (BACKWARD, 0, 0), (WEIGHTS, 0, 0)]


def test_what_is_computed_again_in_a_backward_belongs_to_it(followed):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    class Recomputing(nn.Module):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=True)

    Recomputing()(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert whole(followed) == [(FORWARD, 0, 0), (BACKWARD, 0, 0)]


def test_a_forward_that_is_left_by_an_exception_and_one_without_gradients(followed):
    class Over(BaseException): ...

    class Stage(nn.Linear):
        def forward(self, x):
            super().forward(x)
            raise Over

    with pytest.raises(Over):
        Stage(3, 3)(torch.randn(2, 3))
    with torch.no_grad():
        nn.Linear(3, 3)(torch.randn(2, 3))
    assert whole(followed) == [(FORWARD, 0, 0)]


def launch(*ranks):
    """Return a launch whose ranks computed these chunks, as one step each."""
    steps = [(tuple(Chunk(*chunk) for chunk in chunks),) for chunks in ranks]
    return LaunchTimings(
        tuple(RankTiming(rank, NOTHING, (NOTHING,), pipeline=step) for rank, step in enumerate(steps)), 1.0
    )


def test_the_bubble_is_what_stages_wait_of_a_step():
    first = [(FORWARD, 0, 0, 10.0, 11.0), (BACKWARD, 0, 0, 13.0, 14.0)]
    last = [(FORWARD, 0, 0, 11.0, 12.0), (BACKWARD, 0, 0, 12.0, 13.0)]
    assert bubble(launch(first, last), [[0, 1]]) == pytest.approx(0.5)
    assert bubble(launch(first, first), [[0], [1]]) == pytest.approx(0.5), "each of two pipelines has its own span"
    assert bubble(launch(first, []), [[0, 1]]) is None, "a rank without chunks says nothing"


def test_stages_are_counted_in_the_order_of_the_model_over_ranks():
    turning = launch(
        [(FORWARD, 0, 0, 10.0, 11.0), (FORWARD, 1, 0, 13.0, 14.0)],
        [(FORWARD, 1, 0, 12.0, 13.0), (FORWARD, 0, 0, 11.0, 12.0)],
    )
    drawn = timeline(turning, [[0, 1]])
    assert [(one.rank, one.stage, one.begin) for one in drawn] == [(0, 0, 0.0), (0, 3, 3.0), (1, 2, 2.0), (1, 1, 1.0)]


@pytest.mark.parametrize(
    ("subject", "file", "backend", "kinds"),
    [
        ("torch", "torch", "pp", [FORWARD, BACKWARD]),
        ("torch-interleaved-1f1b", "torch-schedules", "pp", [FORWARD, BACKWARD]),
        ("torch-zbv-zero-bubble", "torch-schedules", "pp", [FORWARD, BACKWARD, WEIGHTS]),
        ("reference", "reference", "balanced", [FORWARD, BACKWARD]),
    ],
)
def test_real_pipelines_are_measured_and_followed(warm_pool, tmp_path, subject, file, backend, kinds):
    cell = Cell(subject, "perf-resnet", backend, Topology(1, 2), "32", "cpu")
    with closing(TimedLaunch.begin(warm_pool(file), cell, tmp_path, Settings(600.0))) as launch:
        for _ in range(4):
            launch.round()
        launch.profile()
        told = launch.end()
    groups = cell.parallelism.replicas(cell.topology)
    found = samples_of([LaunchSample(told)], 2, replicas=groups)
    assert 0 <= found["pipeline_bubble", None][0] < 1
    drawn = timeline(told, groups)
    stages = {chunk.stage for chunk in drawn}
    assert stages == set(range(len(stages)))
    for kind in (FORWARD, BACKWARD):
        seen = {(one.stage, one.micro_batch) for one in drawn if one.kind == kind}
        assert seen == {(stage, number) for stage in stages for number in range(cell.parallelism.micro_batches)}
    assert {one.kind for one in drawn} == set(kinds)
    for rank in (0, 1):  # a rank computes one chunk at a time
        own = sorted((one.begin, one.end) for one in drawn if one.rank == rank)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
