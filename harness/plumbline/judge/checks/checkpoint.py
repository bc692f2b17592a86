"""Does a training that is interrupted and resumed end where the same training ends without interruption?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from plumbline.core.finding import UNEXPLAINED, Finding
from plumbline.core.numbers import scale_text
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import Step, same
from plumbline.judge.causes.optimizer_state import OptimizerStateCase
from plumbline.judge.causes.resumed_progress import ProgressCase, ResumedRatesCase
from plumbline.judge.causes.resumed_state import OrderCase, ResumedBuffersCase, ResumedWeightsCase, ScaleCase, StopCase
from plumbline.judge.checks.gradients import gradients
from plumbline.judge.checks.launch import launch
from plumbline.judge.checks.learning_rate import listed, rates_differ
from plumbline.judge.checks.skipped_steps import skipped_steps
from plumbline.judge.checks.update import update
from plumbline.judge.checks.weights import ranks_agree, stillness
from plumbline.judge.findings import Vacuous, error_at, failed, from_deviation, with_parameters
from plumbline.judge.full_training import FullTraining
from plumbline.judge.hypothesis import explain
from plumbline.judge.interrupted_training import Interruption, saving_cell
from plumbline.judge.oracle.noise import Deviation, distance, in_noise, largest, limit
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.judge.update_replay import replay, update_errors

PartCheck = Callable[[Interruption], Finding | None]

_failed = partial(failed, "checkpoint", family="checkpoint")


def checkpoint(analysis: TraceAnalysis) -> Finding | None:
    """Compare an interrupted training with the uninterrupted one, in the order in which a mistake spreads.

    Mistakes that also happen without an interruption do not count here. None if the workload has no interruption.
    """
    if analysis.workload.interrupt_after is None:
        return None
    saved, resumed = analysis.trace.saved, analysis.trace.resumed
    if saved is None:
        raise Vacuous("there is no trace of the interrupted training")
    broken = launch(saved, saving_cell(analysis))
    if broken is not None:
        return _broken(broken, "the launch that was to be interrupted")
    if resumed is None:
        raise Vacuous("there is no trace of the resumed training")
    broken = launch(resumed, analysis.cell)
    if broken is not None:
        return _broken(broken, "the launch that resumed")
    interruption = Interruption(analysis, saved, resumed)
    for check in PART_CHECKS:
        if (finding := check(interruption)) is not None:
            return finding
    _refuse_vacuous(interruption)
    return _end(interruption)


def _broken(broken: Finding, which: str) -> Finding:
    message = f"{which} failed: {broken.message}"
    return replace(broken, check="checkpoint", message=message, cause="interruption-broke", family="checkpoint")


def _stopped(interruption: Interruption) -> Finding | None:
    """The launch that saves takes, or attempts, exactly the requested number of steps."""
    after = interruption.workload.interrupt_after
    for trace in interruption.saved.trace.ranks:
        attempts, taken = len(trace.steps), sum(not step.skipped for step in trace.steps)
        if after not in (attempts, taken):
            message = f"the launch that was to be interrupted after {after} steps took {attempts}"
            return explain(_failed(message, rank=trace.rank), StopCase(interruption, trace.rank))
    return None


def _same_so_far(interruption: Interruption) -> Finding | None:
    whole, saved, _ = interruption.draws
    for step, draws in enumerate(saved):
        if draws != whole[step]:
            message = "before the interruption, the training used different samples than the uninterrupted one"
            return explain(_failed(message, step=step), OrderCase(interruption, 0))
    return None


def _weights(interruption: Interruption) -> Finding | None:
    """Before the first resumed step, every rank must hold, bit for bit, the weights that the saving launch left."""
    for trace in interruption.resumed.trace.ranks:
        if not trace.steps:
            continue  # ``_progress`` judges the number of steps
        before, left = trace.steps[0].before, interruption.left(trace.rank)
        if not any(same(before, weights) for weights in left):
            wrong = [name for name, value in left[0].items() if name not in before or not value.equal(before[name])]
            message = f"training resumed with {len(wrong)} of {len(left[0])} parameters that differ from the saved ones"
            name = wrong[0] if wrong else None
            finding = _failed(message, step=interruption.steps_done, rank=trace.rank, parameter=name)
            return explain(finding, ResumedWeightsCase.of(interruption, trace.rank))
    return None


def _buffers(interruption: Interruption) -> Finding | None:
    """The first resumed forward starts with the saved buffers: a rank's own, or the first rank's."""
    for trace in interruption.resumed.trace.ranks:
        if not trace.steps:
            continue
        begun = trace.steps[0].buffers
        left = [interruption.origin(rank).final_buffers for rank in (0, trace.rank)]
        if not any(same(begun, buffers) for buffers in left):
            wrong = next((n for n, value in left[0].items() if n not in begun or not value.equal(begun[n])), None)
            message = "training resumed with a buffer that differs from the saved one"
            finding = _failed(message, step=interruption.steps_done, rank=trace.rank, parameter=wrong)
            return explain(finding, ResumedBuffersCase.of(interruption, trace.rank))
    return None


def _progress(interruption: Interruption) -> Finding | None:
    """The resumed steps are exactly the remaining ones, each with the samples of the uninterrupted training."""
    whole, _, resumed = interruption.draws
    rest = interruption.total - interruption.steps_done
    for step, (used, due) in enumerate(
        zip(resumed, whole[interruption.steps_done :], strict=False), interruption.steps_done
    ):
        if used != due:
            common = len(set(used) & set(due))
            message = f"the resumed training used different samples ({common} of {len(due)} are the same)"
            return explain(_failed(message, step=step), ProgressCase(interruption, 0))
    for trace in interruption.resumed.trace.ranks:
        if len(trace.steps) != rest:
            done = f"{interruption.steps_done} of {interruption.total} steps"
            message = f"training resumed after {done} and took {len(trace.steps)} more"
            finding = _failed(message, step=interruption.steps_done, rank=trace.rank)
            return explain(finding, ProgressCase(interruption, trace.rank))
    return None


def _state(interruption: Interruption) -> Finding | None:
    """The resumed optimizer must step like one whose state comes from all steps before."""
    ranks = range(len(interruption.resumed.trace.ranks))
    allowed = interruption.whole.allowed(limit())
    errors = [
        error
        for rank in ranks
        for error in update_errors(interruption.joined(rank), interruption.resumed, allowed)
        if (error.step or 0) >= interruption.steps_done
    ]
    worst = largest(errors)
    if worst.x_noise <= allowed or _is_bad(update, interruption.whole):
        return None
    message = "the resumed optimizer's steps differ from those of an uninterrupted one"
    finding = _from_deviation(Outcome.FAILED, f"{message}: {error_at(worst, allowed)}", worst, allowed)
    return explain(with_parameters(finding, errors), OptimizerStateCase(interruption, allowed))


def _rates(interruption: Interruption) -> Finding | None:
    for step, rank, own, other in interruption.pairs():
        used, due = own.learning_rates, other.learning_rates
        if rates_differ(used, due):
            message = f"after resuming, the learning rate was {listed(used)} instead of {listed(due)}"
            return explain(
                _failed(message, step=step, rank=rank), ResumedRatesCase(interruption.whole, rank, interruption)
            )
    return None


def _scale(interruption: Interruption) -> Finding | None:
    for step, rank, own, other in interruption.pairs():
        if own.scale != other.scale:
            message = f"after resuming, the loss scale was {_scale_in_words(own)} instead of {_scale_in_words(other)}"
            return explain(_failed(message, step=step, rank=rank), ScaleCase(interruption, rank, step))
    return None


def _scale_in_words(step: Step) -> str:
    return "none" if step.scale is None else scale_text(step.scale)


def _ordinary(interruption: Interruption) -> Finding | None:
    """The parts of the training must pass those checks of single steps that the uninterrupted training passes."""
    parts = [(interruption.resumed, interruption.steps_done, "resumed training (steps counted from the restart)")]
    if interruption.saved.cell != interruption.whole.cell:
        parts.append((interruption.saved, 0, "interrupted training"))
    for check in (gradients, ranks_agree, stillness, skipped_steps):
        for part, begin, which in parts:
            finding = check(part)
            if finding is None or not finding.outcome.is_bad or _is_bad(check, interruption.whole):
                continue
            cause = "wrong-after-resuming" if part is interruption.resumed else "wrong-before-the-interruption"
            return replace(
                finding,
                check="checkpoint",
                message=f"the {which} is wrong where the uninterrupted one is right: {finding.message}",
                cause=cause,
                family="checkpoint" if part is interruption.resumed else finding.family,
                step=None if finding.step is None else begin + finding.step,
            )
    return None


PART_CHECKS: tuple[PartCheck, ...] = (
    _stopped, _same_so_far, _weights, _buffers, _progress, _state, _rates, _scale, _ordinary,
)  # fmt: skip
"""In the order in which a mistake spreads: each failure can be a consequence of an earlier one."""


def _end(interruption: Interruption) -> Finding:
    """Compare the weights at the end with those of the uninterrupted training, which is what the user wants to know."""
    full_training = interruption.whole.once(FullTraining)
    resumed, whole = (analysis.steps[-1].ranks[0].after for analysis in (interruption.resumed, interruption.whole))
    step = interruption.total - 1
    errors = [
        Deviation(in_noise(distance(value, whole[name]), full_training.noise[name]), step, name)
        for name, value in resumed.items()
        if name in full_training.noise and name in whole
    ]
    allowed, worst = interruption.whole.allowed(full_training.limit), largest(errors)
    resumed_at = f"training resumed after step {interruption.steps_done} of {interruption.total}"
    error = error_at(worst, allowed)
    if worst.x_noise <= allowed:
        message = f"{resumed_at} ends with the weights of the uninterrupted one: {error}"
        return _from_deviation(Outcome.PASSED, message, worst, allowed)
    message = f"{resumed_at} ends with different weights than the uninterrupted one: {error}; each single step is right"
    finding = replace(_from_deviation(Outcome.FAILED, message, worst, allowed), cause=UNEXPLAINED, family="checkpoint")
    return with_parameters(finding, errors)


_from_deviation = partial(from_deviation, "checkpoint")


def _refuse_vacuous(interruption: Interruption) -> None:
    left, start = interruption.left(0)[0], interruption.whole.start
    if all(name not in left or torch.equal(left[name], value) for name, value in start.items()):
        raise Vacuous("no weight had moved when training was interrupted, so nothing could be lost")
    steps = [step for trace in interruption.resumed.trace.ranks for step in trace.steps]
    if all(same(step.before, step.after) for step in steps):
        raise Vacuous("no weight moved after training was resumed")
    without_state = largest(replay(interruption.resumed.trace.ranks[0], interruption.resumed))
    if without_state.x_noise <= interruption.whole.allowed(limit()):
        raise Vacuous("an optimizer that had lost its state would have made the same weights")


def _is_bad(check: Callable[[TraceAnalysis], Finding | None], analysis: TraceAnalysis) -> bool:
    try:
        finding = check(analysis)
    except Vacuous:
        return True
    return finding is not None and finding.outcome.is_bad
