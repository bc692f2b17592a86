"""Traces of right trainers without processes, and launches of wrong ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from plumbline.core.outcome import worst
from plumbline.engine.examine import examine
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.judge import judge
from plumbline.judge.oracle.oracle import Oracle, mean_gradient
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings

DETECTION = Path(__file__).parents[2] / "suites" / "detection" / "everybody.py"
TIME_LIMIT_S = 300
"""Seconds for a launch that takes less than one on an idle machine."""


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """The judge's tensors are small."""


def seeded(workload, seed):
    """Return the same problem with other weights, data and order."""
    return type(workload)() if seed is None else type(type(workload).__name__, (type(workload),), {"seed": seed})()


def shares_of(cell, batch):
    """Split a step's samples over ranks, and each rank's over its devices, equally and in order."""
    ranks = torch.tensor(batch).chunk(cell.processes)
    spread = cell.parallelism.devices_per_process(cell.topology)
    return [tuple(tuple(share.tolist()) for share in rank.chunk(spread)) for rank in ranks]


def reduced(parts, rng):
    """Average the groups' gradients like some all-reduce: in any order, divided before or after the sum."""
    (groups,) = parts
    groups = rng.sample(groups, len(groups))
    if rng.random() < 0.5:
        return mean_gradient([groups])
    total = {name: value.clone() for name, value in groups[0].items()}
    for group in groups[1:]:
        for name, value in group.items():
            total[name] += value
    return {name: value / len(groups) for name, value in total.items()}


def right_trace(workload, cell, seed=0):
    """Train correctly in the cell's precision, with a random order of summation, and return the evidence."""
    rng = random.Random(seed)
    trainer = Oracle(workload, cell.topology.devices, cell.arithmetic)
    optimizer = trainer.optimizer()
    size = workload.global_batch_size(cell.topology.devices)
    scale = 65536.0 if cell.arithmetic.scaled else None
    steps = [[] for _ in range(cell.processes)]
    for _ in range(workload.epochs):
        order = rng.sample(range(len(trainer.data)), len(trainer.data))
        for start in range(0, len(order), size):
            ranks = shares_of(cell, order[start : start + size])
            before = {name: p.detach().clone() for name, p in trainer.parameters.items()}
            layout = (
                tuple(tuple(tuple(rng.sample(s, len(s))) for s in rng.sample(rank, len(rank))) for rank in ranks),
            )
            gradients = reduced(trainer.group_gradients(layout, scale or 1.0), rng)
            skipped = not all(bool(value.isfinite().all()) for value in gradients.values())
            if not skipped:
                trainer.set_gradients(gradients)
                optimizer.step()
            after = {name: p.detach().clone() for name, p in trainer.parameters.items()}
            for rank, forwards in enumerate(ranks):
                loss = tuple(i for share in forwards for i in share)
                micro = (MicroBatch(forwards, loss),)
                rates = tuple(group["lr"] for group in optimizer.param_groups)
                steps[rank].append(Step(micro, before, gradients, after, rates, skipped, scale))
            if skipped:
                scale /= 2
    return Trace(tuple(RankTrace(rank, cell.processes, tuple(own)) for rank, own in enumerate(steps)))


class Simulation:
    """Helpers that test files share, because they cannot import one another."""

    seeded = staticmethod(seeded)
    right_trace = staticmethod(right_trace)
    shares_of = staticmethod(shares_of)

    @staticmethod
    def judge(trace, workload, cell):
        """Return the findings of a trace by check."""
        return {finding.check: finding for finding in judge(TraceAnalysis(trace, workload, cell))}


@pytest.fixture(scope="session")
def simulation():
    return Simulation


@pytest.fixture
def verdict(warm_pool, cell_of, tmp_path):
    """Train a cell with real ranks; return its findings by check, and the worst of them."""

    def verdict(subject, workload, backend, topology, precision="32", *, locator=DETECTION):
        cell = cell_of(workload, backend, topology, precision, subject=subject)
        examined = examine(warm_pool(locator), cell, tmp_path / cell.id, Settings(TIME_LIMIT_S))
        findings = {finding.check: finding for finding in examined.findings}
        return findings, worst(finding.outcome for finding in findings.values())

    return verdict
