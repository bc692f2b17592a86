"""Why ranks hold different weights: the reason agrees with other checks, and with what ranks hold together."""

from __future__ import annotations

import pytest
import torch

from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import RankTrace, Step, Trace
from plumbline.judge.checks.weights import ranks_agree
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import WORKLOADS


def parted(held, cell, *, weights=0.0):
    """Return the finding on ranks with different gradients; ``held`` has each rank's parameters."""
    ranks = []
    for rank, names in enumerate(held):
        before = {name: torch.ones(2) + rank * weights for name in names}
        gradients = {name: torch.full((2,), 1.0 + rank) for name in names}
        after = {name: value - gradients[name] for name, value in before.items()}
        ranks.append(RankTrace(rank, len(held), (Step((), before, gradients, after, (0.1,)),), final=after))
    finding = ranks_agree(TraceAnalysis(Trace(tuple(ranks)), WORKLOADS[cell.workload], cell))
    assert finding.outcome is Outcome.FAILED
    return finding


def test_ranks_with_experts_of_their_own_do_not_begin_differently(cell_of):
    finding = parted([["router", "expert 0"], ["router", "expert 1"]], cell_of("experts", "ep", "1x2"))
    assert finding.cause == "not-synchronised"
    assert "begin with different weights" not in finding.message


def test_ranks_that_begin_differently_are_told_so(cell_of):
    finding = parted([["router", "expert 0"], ["router", "expert 1"]], cell_of("experts", "ep", "1x2"), weights=0.5)
    assert finding.cause == "not-broadcast"


@pytest.mark.parametrize(
    ("backend", "topology", "held"),
    [
        ("sp", "1x2", [["first", "last"], ["first", "last"]]),
        ("tp", "1x2", [["first", "last"], ["first", "last"]]),
        ("balanced", "2x2", [["first"], ["last"], ["first"], ["last"]]),
    ],
)
def test_replicas_of_a_weight_have_no_parts_to_add(cell_of, backend, topology, held):
    finding = parted(held, cell_of("transformer", backend, topology))
    assert finding.cause == "not-synchronised"
    assert "sum its gradient over all ranks" not in finding.message


def test_stages_that_hold_a_tied_weight_add_their_parts(cell_of):
    finding = parted([["tied", "first"], ["tied", "last"]], cell_of("transformer", "pp", "1x2"))
    assert finding.cause == "tied-gradients-not-added"
    assert "sum its gradient over all ranks" in finding.message
