"""Why weights are not what they should be, apart from the optimizer's own steps: before, between and after them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.core.finding import Finding
from harness.evidence.trace import Step, Tensors
from harness.judge.causes.cause import Cause, explained
from harness.judge.causes.shared_memory import moved_by_others
from harness.judge.causes.step_count import pace
from harness.judge.oracle.noise import distance, norm
from harness.judge.trace_analysis import TraceAnalysis, same


def explain_initial(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return a finding about the weights before the first step with a cause."""
    return explained(finding, pace_of_nothing(analysis), _moved_by_other_ranks(analysis), _start(analysis))


def explain_agreement(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return a finding about ranks that hold different weights with a cause: where they parted first."""
    return explained(finding, moved_by_others(analysis), _parted(analysis))


def explain_stillness(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return a finding about weights that changed apart from any step with a cause."""
    return explained(finding, moved_by_others(analysis), _between_steps(analysis), _after_the_last(analysis))


def pace_of_nothing(analysis: TraceAnalysis) -> Cause | None:
    """Return why there is nothing to look at, where there is not."""
    return pace(analysis) if not analysis.steps else None


def _moved_by_other_ranks(analysis: TraceAnalysis) -> Cause | None:
    """A rank begins as many updates from the start as ranks before it have stepped: they share their memory."""
    for rank, step in enumerate(analysis.steps[0].ranks):
        if _updates_between(analysis.start, step.before, step, analysis):
            look = f"rank {rank} begins where others have stepped already: do ranks share the parameters' memory?"
            return Cause("applied-once-a-rank", "averaging", look, step=0, rank=rank)
    return None


def _updates_between(left: Tensors, found: Tensors, step: Step, analysis: TraceAnalysis) -> bool:
    """Say whether ``found`` is ``left`` and so many of the step's own update as other ranks may have made."""
    names = [name for name in left if name in found and name in step.before]
    if not names:
        return False
    moved, made = _difference(found, left, names), _difference(step.after, step.before, names)
    if not norm(moved) or not norm(made):
        return False
    times = round(float(moved @ made / (made @ made)))
    # Rounding of the weights limits how well the multiple is known.
    return 1 <= times < analysis.cell.processes and norm(moved - times * made) <= 1e-3 * norm(made)


def _start(analysis: TraceAnalysis) -> Cause | None:
    ranks = [step.before for step in analysis.steps[0].ranks]
    if any(analysis.start.keys() - before.keys() for before in ranks):
        return Cause("parameters-missing", "sync", "is it the job's model that is trained?", step=0)
    if all(same(before, ranks[0]) for before in ranks[1:]):
        look = "all ranks begin with the same weights, which are not job.model()'s: were they initialised anew?"
        return Cause("initialised-anew", "sync", look, step=0)
    first = ranks[0]
    differing = {n for before in ranks[1:] for n in before if n in first and not torch.equal(before[n], first[n])}
    which = "weights" if differing == first.keys() else f"{len(differing)} of {len(first)} parameters"
    look = f"{which} differ between the ranks: are they broadcast, all of them, at the start?"
    return Cause("not-broadcast", "sync", look, step=0)


def _parted(analysis: TraceAnalysis) -> Cause | None:
    for global_step in analysis.steps:
        first = global_step.ranks[0]
        for rank, step in enumerate(global_step.ranks):
            place = {"step": global_step.index, "rank": rank}
            if not same(step.before, first.before):
                if global_step.index == 0:
                    return Cause("not-broadcast", "sync", "ranks begin with different weights", **place)
                return Cause("changed-between-steps", "sync", "a rank's weights changed apart from a step", **place)
            if same(step.after, first.after):
                continue
            if step.learning_rates != first.learning_rates:
                look = "ranks step with different learning rates"
                return Cause("rates-differ", "optimizer", look, **place)
            if not same(step.gradients, first.gradients):
                look = "ranks step with different gradients, which must be averaged, all of them, before the step"
                return Cause("not-synchronised", "sync", look, **place)
            look = "the same gradient moves ranks differently: have their optimizers the same state?"
            return Cause("updates-differ", "optimizer", look, **place)
    return None


def _between_steps(analysis: TraceAnalysis) -> Cause | None:
    for before, global_step in zip(analysis.steps, analysis.steps[1:], strict=False):
        for rank, step in enumerate(global_step.ranks):
            left = before.ranks[rank].after
            if same(step.before, left):
                continue
            place = {"step": before.index, "rank": rank}
            if before.ranks[rank].skipped:
                look = "a step that was skipped must leave the weights still"
                return Cause("moved-when-skipped", "amp", look, **place)
            if _is_mean(step.before, [other.after for other in before.ranks]):
                look = "weights were averaged over the ranks where gradients should have been"
                return Cause("weights-averaged", "sync", look, **place)
            look = "weights change apart from the optimizer's steps"
            return Cause("changed-between-steps", "optimizer", look, **place)
    return None


def _after_the_last(analysis: TraceAnalysis) -> Cause | None:
    ranks = [(trace.steps[-1], trace.final) for trace in analysis.trace.ranks if trace.steps and trace.final]
    if any(final and step.skipped and not same(step.after, final) for step, final in ranks):
        return Cause("moved-when-skipped", "amp", "a step that was skipped must leave the weights still")
    return Cause("changed-after-the-last-step", "optimizer", "what is left at the end is not what the last step left")


def _is_mean(value: Tensors, ranks: Sequence[Tensors]) -> bool:
    """Say whether ranks that had parted meet in their mean: a thousand times nearer to it than they were."""
    for name, met in value.items():
        mean = torch.stack([rank[name].double() for rank in ranks]).mean(0)
        if distance(met, mean) > 1e-3 * max(distance(rank[name], mean) for rank in ranks):
            return False
    return len(ranks) > 1


def _difference(left: Tensors, right: Tensors, names: Sequence[str]) -> torch.Tensor:
    return torch.cat([(left[name].double() - right[name].double()).flatten() for name in names])
