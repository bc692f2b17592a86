"""A step that the loss scaler skipped must not change the weights, whatever they were."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.checks.skipped_steps import skipped_steps
from plumbline.judge.checks.weights import ranks_agree
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import WORKLOADS


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0], [1.0, 3.0], "moved-when-skipped"),
        ([1.0, torch.nan], [1.0, torch.nan], None),
        ([1.0, torch.nan], [2.0, torch.nan], "moved-when-skipped"),
    ],
)
def test_weights_that_are_not_numbers_stand_still_too(before, after, cause):
    weights = ({"w": torch.tensor(values)} for values in (before, after))
    overflow = {"w": torch.full((2,), torch.inf)}
    step = Step((MicroBatch(((0,),), (0,)),), next(weights), overflow, next(weights), (0.1,), True, 65536.0)
    found = skipped_steps(SimpleNamespace(trace=Trace((RankTrace(0, 1, (step,)),)), steps=()))
    assert (found.outcome, found.cause) == (Outcome.FAILED if cause else Outcome.PASSED, cause)


@pytest.mark.parametrize(("after", "cause"), [([1.0, 1.0], None), ([1.0, 2.0], "moved-when-skipped")])
def test_an_optimizer_that_was_held_back_leaves_its_own_weights_alone(after, cause):
    before, after = ({name: torch.tensor([value]) for name, value in zip("vw", values, strict=True)}
                     for values in ([0.0, 1.0], after))  # fmt: skip
    overflow = {"w": torch.tensor([torch.inf])}
    step = Step((MicroBatch(((0,),), (0,)),), before, {"v": torch.ones(1)}, after, (0.1,), held_back=overflow)
    found = skipped_steps(SimpleNamespace(trace=Trace((RankTrace(0, 1, (step,)),)), steps=()))
    assert (found.outcome, found.cause) == (Outcome.FAILED if cause else Outcome.PASSED, cause)


@pytest.mark.parametrize("held_back", [(True, True), (True, False)])
def test_one_rank_alone_may_not_hold_an_optimizer_back(simulation, held_back):
    cell = Cell("somebody", "mlp", "ddp", Topology(1, 2), "16", "cpu")
    trace = simulation.right_trace(WORKLOADS["mlp"], cell)
    name = next(iter(trace.ranks[0].steps[0].before))
    overflow = {name: torch.full_like(trace.ranks[0].steps[0].before[name], torch.inf)}
    ranks = [replace(rank, steps=(replace(rank.steps[0], held_back=overflow if held else {}), *rank.steps[1:]))
             for rank, held in zip(trace.ranks, held_back, strict=True)]  # fmt: skip
    found = ranks_agree(TraceAnalysis(Trace(tuple(ranks)), WORKLOADS["mlp"], cell))
    assert (found.cause == "overflow-decided-alone") is not all(held_back)


@pytest.mark.parametrize(("scale", "cause"), [(16.0, "skipped-without-overflow"), (2.0**30, None)])
@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(1, 3)], ids=str)
def test_an_overflow_that_one_device_is_far_from_is_no_reason_to_skip(simulation, topology, scale, cause):
    cell = Cell("somebody", "mlp", "ddp" if topology.devices > 1 else "none", topology, "16", "cpu")
    ranks = []
    for rank in simulation.right_trace(WORKLOADS["mlp"], cell).ranks:
        *steps, last = rank.steps
        left = {name: torch.full_like(gradient, torch.inf) for name, gradient in last.gradients.items()}
        last = replace(last, gradients=left, after=last.before, skipped=True, scale=scale)
        ranks.append(replace(rank, steps=(*steps, last)))
    found = skipped_steps(TraceAnalysis(Trace(tuple(ranks)), WORKLOADS["mlp"], cell))
    assert (found.outcome, found.cause) == (Outcome.FAILED if cause else Outcome.PASSED, cause)
