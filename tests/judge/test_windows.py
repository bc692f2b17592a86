"""Accumulation windows of unequal length: each step is compared with both ways of one device."""

from __future__ import annotations

import pytest

from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.oracle.layout import one_device_layout
from plumbline.judge.oracle.oracle import Oracle
from plumbline.workloads import WORKLOADS


def trained(workload, cell, factor):
    """Train on one device; multiply the gradient of a window of one micro-batch by ``factor``."""
    oracle = Oracle(workload, cell.topology.devices, cell.arithmetic)
    optimizer = oracle.optimizer()
    schedule = oracle.schedule(optimizer)
    size, steps = workload.global_batch_size(1), []
    for _ in range(workload.epochs):
        batches = [tuple(range(first, first + size)) for first in range(0, len(oracle.data), size)]
        for first in range(0, len(batches), workload.accumulate):
            window = batches[first : first + workload.accumulate]
            gradient = oracle.gradient(one_device_layout(tuple(((batch,),) for batch in window)))
            if len(window) == 1:
                gradient = {name: value * factor for name, value in gradient.items()}
            gradient = {name: value.to(oracle.dtype) for name, value in gradient.items()}
            before = {name: p.detach().clone() for name, p in oracle.parameters.items()}
            rates = tuple(group["lr"] for group in optimizer.param_groups)
            oracle.set_gradients(gradient)
            optimizer.step()
            schedule()
            after = {name: p.detach().clone() for name, p in oracle.parameters.items()}
            micro_batches = tuple(MicroBatch((batch,), batch) for batch in window)
            steps.append(Step(micro_batches, before, gradient, after, rates))
    return Trace((RankTrace(0, 1, tuple(steps)),))


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, Outcome.PASSED), (0.5, Outcome.FAILED)])
def test_a_window_of_one_micro_batch_is_judged_like_the_others(simulation, cell_of, factor, outcome):
    workload, cell = WORKLOADS["schedule-windows"], cell_of("schedule-windows", "none", "1x1", "32")
    found = simulation.judge(trained(workload, cell, factor), workload, cell)["gradients"]
    assert found.outcome is outcome, found
