"""Products of sharded matrices are sums of rounded parts: other rounding is right, another update is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import RankTrace, Step, Trace
from plumbline.judge.checks import CHECKS
from plumbline.judge.oracle.noise import PartialSums
from plumbline.judge.oracle.oracle import Oracle
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.judge.update_replay import weights_after
from plumbline.workloads import WORKLOADS
from plumbline.workloads.basics import Mlp


class MuonMlp(Mlp):
    """The perceptron's matrices under Muon, with frozen biases."""

    def build(self):
        model = super().build()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        return model

    def optimizer(self, params):
        return torch.optim.Muon([p for p in params if p.requires_grad], lr=0.02)


@given(st.integers(1, 5), st.integers(0, 9), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_product_is_the_same_in_any_number_of_parts(rows, inner, columns, parts, batched):
    draw = torch.Generator().manual_seed(0)
    shape = (2,) if batched else ()
    left = torch.randn(*shape, rows, inner, generator=draw, dtype=torch.float64)
    right = torch.randn(*shape, inner, columns, generator=draw, dtype=torch.float64)
    added = torch.randn(rows, columns, generator=draw, dtype=torch.float64)
    with PartialSums(parts):
        product = left @ right
        fused = product if batched else torch.addmm(added, left, right, beta=0.5, alpha=3)
    assert torch.allclose(product, left @ right, rtol=1e-12, atol=1e-12)
    assert batched or torch.allclose(fused, 0.5 * added + 3 * (left @ right), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "adamw", "clipping-adamw"])
def test_an_optimizer_without_products_gives_the_same_bits_in_parts(name):
    whole, in_parts = after_a_step(WORKLOADS[name], None), after_a_step(WORKLOADS[name], 3)
    assert all(torch.equal(in_parts[parameter], value) for parameter, value in whole.items())


def after_a_step(workload, parts):
    """Return the weights after one step."""
    oracle = Oracle(workload, 2)
    gradients = oracle.gradient((((tuple(range(24)),),),))
    return weights_after(oracle, oracle.optimizer(), oracle.weights(), gradients, (), parts)


@pytest.mark.parametrize(("parts", "outcome"), [(2, Outcome.PASSED), (None, Outcome.FAILED)])
def test_an_update_in_parts_is_right_and_another_update_is_not(cell_of, simulation, parts, outcome):
    """Muon orthogonalises: half of the matrix by itself gives another update, not just other rounding."""
    workload, cell = MuonMlp(), cell_of("mlp", "ddp", "1x2")
    trace = simulation.right_trace(workload, cell)
    oracle = Oracle(workload, 2, cell.arithmetic)
    optimizer = oracle.optimizer()
    ranks: list[list[Step]] = [[] for _ in trace.ranks]
    for steps in zip(*(rank.steps for rank in trace.ranks), strict=True):
        first = steps[0]
        used = first.gradients
        if parts is None:
            used = {name: value.clone() for name, value in used.items()}
            used["layers.0.weight"][16:] = 0
        after = weights_after(oracle, optimizer, first.before, used, first.learning_rates, parts)
        after = {name: value.to(first.after[name].dtype) for name, value in after.items()}
        for rank, step in zip(ranks, steps, strict=True):
            rank.append(replace(step, after=after))
    changed = Trace(tuple(RankTrace(rank, 2, tuple(own)) for rank, own in enumerate(ranks)))
    assert CHECKS[TraceAnalysis]["update"](TraceAnalysis(changed, workload, cell)).outcome is outcome
