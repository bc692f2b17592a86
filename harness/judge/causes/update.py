"""Finds the explanation of a wrong update: the gradient was right, or at least its own, and the weights are not."""

from __future__ import annotations

from dataclasses import replace

import torch

from harness.core.finding import Finding
from harness.evidence.trace import Tensors
from harness.judge.causes.shared_memory import moved_by_others
from harness.judge.oracle.noise import norm
from harness.judge.oracle.oracle import Oracle
from harness.judge.oracle.update_replay import weights_after
from harness.judge.trace_analysis import TraceAnalysis


def explain(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return the finding with a cause, if the update is a multiple of the right one, or nothing moved."""
    if finding.step is None:
        return finding
    trace = analysis.trace.ranks[finding.rank or 0]
    oracle = Oracle(analysis.workload, analysis.devices)
    optimizer = oracle.optimizer()
    for index, step in enumerate(trace.steps[: finding.step + 1]):
        if step.skipped:
            continue
        weights = weights_after(oracle, optimizer, step.before, step.gradients, step.learning_rates)
        if index != finding.step:
            continue
        if not all(bool(value.isfinite().all()) for value in step.gradients.values()):
            look = "the step was taken on a gradient that is not finite: were infinities looked for on every rank?"
            return _caused(finding, "not-finite", "amp", look)
        names = [name for name in step.after if name in oracle.parameters]
        right = torch.cat([(weights[n] - step.before[n].double()).flatten() for n in names])
        made = torch.cat([(step.after[n].double() - step.before[n].double()).flatten() for n in names])
        if norm(made) == 0:
            return _caused(finding, "no-update", "optimizer", "the weights did not move: was the step undone?")
        if norm(right) == 0:
            return finding
        if analysis.cell.arithmetic.storage == "float64" and all(_fits_float32(step.after[name]) for name in names):
            look = "the weights hold no more bits than float32 has: is the model cast?"
            return _caused(finding, "stored-in-lower-precision", "amp", look)
        factor = float(made @ right / (right @ right))
        part = _only_its_share(analysis, index, finding.rank or 0, weights)
        if part is not None:
            return _caused(finding, "stepped-in-part", "sync", part)
        if (shared := moved_by_others(analysis)) is not None:
            return shared.explain(finding)
        # Rounding of the weights limits how well the factor is known.
        if norm(made - factor * right) > 1e-3 * norm(made):
            return _caused(
                finding, "another-optimizer", "optimizer", "no multiple of the right update: its rule or state"
            )
        look = f"the update is {factor:.4g} × the right one: another learning rate, or several steps for one batch"
        return _caused(finding, "scaled-update", "optimizer", look)
    return finding


def _fits_float32(value: torch.Tensor) -> bool:
    return torch.equal(value.float().double(), value.double())


def _only_its_share(analysis: TraceAnalysis, index: int, rank: int, right: Tensors) -> str | None:
    """Return what to look at where a rank moved some of the weights, as it should, and other ranks moved the rest."""
    steps = analysis.steps[index].ranks
    before, after = steps[rank].before, steps[rank].after
    due = {name for name in right if name in after and norm(right[name] - before[name].double())}
    moved = [{name for name in due if not torch.equal(step.before[name], step.after[name])} for step in steps]
    if not 0 < len(moved[rank]) < len(due) or set().union(*moved) != due:
        return None
    for name in moved[rank]:
        if norm(after[name].double() - right[name]) > 1e-3 * norm(right[name] - before[name].double()):
            return None
    return (
        f"it moved {len(moved[rank])} of {len(due)} parameters and other ranks the others: "
        "does each rank broadcast its share of the weights when it has stepped?"
    )


def _caused(finding: Finding, cause: str, family: str, look: str) -> Finding:
    return replace(finding, cause=cause, family=family, message=f"{finding.message}: {look}")
