"""In float64, rounding explains next to nothing: an error of one part in ten thousand million is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import Trace
from plumbline.workloads import WORKLOADS

RELATIVE = 1e-10
PLAIN = ["mlp", "cnn-batchnorm", "contrastive", "lm-tokens", "adam", "uneven", "transformer"]


def perturbed(trace, index, part, name):
    """Return the trace with one tensor of one step changed by ``RELATIVE``, in a random direction, on every rank."""
    original = getattr(trace.ranks[0].steps[index], part)[name]
    direction = torch.randn(original.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wrong = original + direction * (RELATIVE * original.norm() / direction.norm())
    ranks = []
    for rank in trace.ranks:
        steps = list(rank.steps)
        steps[index] = replace(steps[index], **{part: {**getattr(steps[index], part), name: wrong}})
        if part == "after" and index + 1 < len(steps):
            # The run continues from there, like a real one.
            steps[index + 1] = replace(steps[index + 1], before=steps[index].after)
        ranks.append(replace(rank, steps=tuple(steps)))
    return Trace(tuple(ranks))


@pytest.fixture(scope="module")
def right_trace(simulation):
    @cache
    def right_trace(cell):
        trace = simulation.right_trace(WORKLOADS[cell.workload], cell)
        findings = simulation.judge(trace, WORKLOADS[cell.workload], cell)
        assert not any(finding.outcome.is_bad for finding in findings.values()), findings
        return trace

    return right_trace


@pytest.mark.parametrize("workload", PLAIN)
@pytest.mark.parametrize(("part", "check"), [("gradients", "gradients"), ("after", "update")])
def test_an_error_of_1e_10_is_a_finding_in_float64(workload, part, check, simulation, right_trace, cell_of, thorough):
    cell = cell_of(workload, "ddp", "1x2", "64")
    trace = right_trace(cell)
    last = len(trace.ranks[0].steps) - 1
    for index in (0, last) if thorough else (last,):
        tensors = getattr(trace.ranks[0].steps[index], part)
        largest = max(float(value.norm()) for value in tensors.values())
        names = list(tensors) if thorough else [max(tensors, key=lambda name: float(tensors[name].norm()))]
        for name in names:
            value = tensors[name]
            if part == "gradients" and float(value.norm()) < 1e-9 * largest:
                continue  # zero by construction (a bias in front of a BatchNorm), except for rounding
            found = simulation.judge(perturbed(trace, index, part, name), WORKLOADS[workload], cell)[check]
            assert found.outcome is Outcome.FAILED, (index, name, found)
            assert found.error_x_noise > 100, (index, name, found)
