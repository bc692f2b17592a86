"""Does a training that is interrupted and resumed end where the same training ends without?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from harness.core.finding import Finding
from harness.core.finding_order import UNEXPLAINED
from harness.core.outcome import Outcome
from harness.judge.causes import explain
from harness.judge.causes.optimizer_state import OptimizerStateCase
from harness.judge.causes.resumed_progress import ProgressCase, ResumedRatesCase
from harness.judge.causes.resumed_state import OrderCase, ResumedBuffersCase, ResumedWeightsCase, ScaleCase, StopCase
from harness.judge.checks.agreement import ranks_agree
from harness.judge.checks.gradients import gradients
from harness.judge.checks.launch import launch
from harness.judge.checks.learning_rate import PRECISION
from harness.judge.checks.skipped import skipped_steps
from harness.judge.checks.stillness import stillness
from harness.judge.checks.update import update
from harness.judge.error_outcome import Deviation, Vacuous, by_parameter, found, larger, times
from harness.judge.interruption import Interruption, saving_cell
from harness.judge.oracle.full_training import RUNS
from harness.judge.oracle.noise import distance, in_noise, limit
from harness.judge.oracle.update_replay import replay
from harness.judge.trace_analysis import DRAWS, TraceAnalysis, same

Question = Callable[[Interruption], Finding | None]


def checkpoint(analysis: TraceAnalysis) -> Finding | None:
    """Follow an interrupted training beside the uninterrupted one, in the order in which a mistake travels.

    What is wrong without an interruption too is not the checkpoint's. None where the workload asks for no interruption.
    """
    if analysis.workload.interrupt_after is None:
        return None
    saved, resumed = analysis.trace.saved, analysis.trace.resumed
    if saved is None:
        raise Vacuous("the evidence of an interrupted training is not here")
    broken = launch(saved, saving_cell(analysis))
    if broken is not None:
        return _broken(broken, "the launch that had to save")
    if resumed is None:
        raise Vacuous("the evidence of a resumed training is not here")
    broken = launch(resumed, analysis.cell)
    if broken is not None:
        return _broken(broken, "the launch that resumed")
    interruption = Interruption(analysis, saved, resumed)
    problem = next((answer for question in QUESTIONS if (answer := question(interruption)) is not None), None)
    if problem is not None:
        return problem
    _refuse_blindness(interruption)
    return _end(interruption)


def _broken(broken: Finding, which: str) -> Finding:
    message = f"{which} broke: {broken.message}"
    return replace(broken, check="checkpoint", message=message, cause="interruption-broke", family="checkpoint")


def _failed(message: str, step: int | None = None, parameter: str | None = None, rank: int | None = None) -> Finding:
    return Finding(
        "checkpoint", Outcome.FAILED, message, family="checkpoint", step=step, parameter=parameter, rank=rank
    )  # fmt: skip


def _stopped(interruption: Interruption) -> Finding | None:
    """The launch that saves attempts, or takes, exactly so many steps."""
    after = interruption.workload.interrupt_after
    for trace in interruption.saved.trace.ranks:
        attempts, taken = len(trace.steps), sum(not step.skipped for step in trace.steps)
        if after not in (attempts, taken):
            message = f"the launch that had to stop after {after} steps took {attempts} on rank {trace.rank}"
            return explain(_failed(message, rank=trace.rank), StopCase(interruption, trace.rank))
    return None


def _same_so_far(interruption: Interruption) -> Finding | None:
    """Until it stops, the launch that saves uses the samples of the uninterrupted one."""
    whole, saved, _ = interruption.draws
    for step, draws in enumerate(saved):
        if draws != whole[step]:
            message = f"already before the interruption, at step {step}, other samples were used than without it"
            return explain(_failed(message, step=step), OrderCase(interruption, 0))
    return None


def _weights(interruption: Interruption) -> Finding | None:
    """Before the first resumed step every rank holds what the launch that saved ended with, bit for bit."""
    for trace in interruption.resumed.trace.ranks:
        if not trace.steps:
            continue  # the number of steps is a question of its own
        before, left = trace.steps[0].before, interruption.left(trace.rank)
        if not any(same(before, weights) for weights in left):
            wrong = [name for name, value in left[0].items() if name not in before or not value.equal(before[name])]
            message = f"rank {trace.rank} resumed with other weights than were left ({len(wrong)} of {len(left[0])})"
            finding = _failed(message, interruption.place, wrong[0] if wrong else None, trace.rank)
            return explain(finding, ResumedWeightsCase.of(interruption, trace.rank))
    return None


def _buffers(interruption: Interruption) -> Finding | None:
    """The first resumed forward begins with the buffers that were left: a rank's own, or the first rank's."""
    for trace in interruption.resumed.trace.ranks:
        if not trace.steps:
            continue
        begun = trace.steps[0].buffers
        left = [interruption.origin(rank).final_buffers for rank in (0, trace.rank)]
        if not any(same(begun, buffers) for buffers in left):
            wrong = next((n for n, value in left[0].items() if n not in begun or not value.equal(begun[n])), None)
            message = f"rank {trace.rank} resumed with another {wrong} than was left"
            finding = _failed(message, interruption.place, wrong, trace.rank)
            return explain(finding, ResumedBuffersCase.of(interruption, trace.rank))
    return None


def _progress(interruption: Interruption) -> Finding | None:
    """The resumed steps are exactly those that were left, each with the samples of the uninterrupted one."""
    whole, _, resumed = interruption.draws
    rest = interruption.total - interruption.place
    for step, (used, due) in enumerate(zip(resumed, whole[interruption.place :], strict=False), interruption.place):
        if used != due:
            common = len(set(used) & set(due))
            message = f"the resumed training used other samples at step {step} ({common} of {len(due)} are the same)"
            return explain(_failed(message, step=step), ProgressCase(interruption, 0))
    for trace in interruption.resumed.trace.ranks:
        if len(trace.steps) != rest:
            message = f"rank {trace.rank} resumed after {interruption.place} of {interruption.total} steps and took "
            finding = _failed(f"{message}{len(trace.steps)} more", step=interruption.place, rank=trace.rank)
            return explain(finding, ProgressCase(interruption, trace.rank))
    return None


def _state(interruption: Interruption) -> Finding | None:
    """The optimizer makes of the resumed gradients what it would with the state that all steps before gave it."""
    ranks = range(len(interruption.resumed.trace.ranks))
    errors = [
        error
        for rank in ranks
        for error in replay(interruption.joined(rank), interruption.resumed)
        if (error.step or 0) >= interruption.place
    ]
    allowed, worst = _limit(interruption), functools.reduce(larger, errors, Deviation(0.0))
    if worst.x_noise <= allowed or _is_bad(update, interruption.whole):
        return None
    message = (
        "the resumed optimizer does not make of the gradients what it would have made without an interruption "
        f"({times(worst.x_noise)}, {worst.where})"
    )
    there = by_parameter(error for error in errors if (error.step, error.rank) == (worst.step, worst.rank))
    finding = replace(found("checkpoint", Outcome.FAILED, message, worst, allowed), parameters=there)
    return explain(finding, OptimizerStateCase(interruption, allowed))


def _rates(interruption: Interruption) -> Finding | None:
    """Each resumed step has the learning rates of the same step of the uninterrupted training."""
    for step, rank, own, other in interruption.pairs():
        used, due = own.learning_rates, other.learning_rates
        pairs = zip(used, due, strict=False)
        if len(used) != len(due) or any(abs(u - d) > PRECISION * abs(d) for u, d in pairs):
            message = f"at step {step} rank {rank} resumed with learning rates {list(used)}, not {list(due)}"
            return explain(_failed(message, step=step, rank=rank), ResumedRatesCase(interruption, rank))
    return None


def _scale(interruption: Interruption) -> Finding | None:
    """Each resumed step has the loss scale of the same step of the uninterrupted training."""
    for step, rank, own, other in interruption.pairs():
        if own.scale != other.scale:
            message = f"at step {step} rank {rank} resumed with a loss scale of {own.scale}, not {other.scale}"
            return explain(_failed(message, step=step, rank=rank), ScaleCase(interruption, rank, step))
    return None


def _ordinary(interruption: Interruption) -> Finding | None:
    """What is asked of every training is asked of the two parts of this one, where the whole has stood it."""
    parts = [(interruption.resumed, interruption.place, "resumed training, its steps counted from there,")]
    if interruption.saved.cell != interruption.whole.cell:
        parts.append((interruption.saved, 0, "interrupted training"))
    for check in (gradients, ranks_agree, stillness, skipped_steps):
        for part, begin, which in parts:
            answer = check(part)
            if answer is None or not answer.outcome.is_bad or _is_bad(check, interruption.whole):
                continue
            cause = "wrong-after-resuming" if part is interruption.resumed else "wrong-before-the-interruption"
            return replace(
                answer,
                check="checkpoint",
                message=f"the {which} is wrong where the uninterrupted one is right: {answer.message}",
                cause=cause,
                family="checkpoint" if part is interruption.resumed else answer.family,
                step=None if answer.step is None else begin + answer.step,
            )
    return None


QUESTIONS: tuple[Question, ...] = (
    _stopped, _same_so_far, _weights, _buffers, _progress, _state, _rates, _scale, _ordinary,
)  # fmt: skip
"""In the order in which a mistake travels: each may be a consequence of those before it."""


def _end(interruption: Interruption) -> Finding:
    """The user's own question: are the weights at the end those of the uninterrupted training?"""
    noise = interruption.whole.free.noise
    resumed, whole = (trace.moments[-1].ranks[0].after for trace in (interruption.resumed, interruption.whole))
    step = interruption.total - 1
    errors = [
        Deviation(in_noise(distance(value, whole[name]), noise[name]), step, name)
        for name, value in resumed.items()
        if name in noise and name in whole
    ]
    worst = functools.reduce(larger, errors, Deviation(0.0))
    allowed = 0.0 if interruption.whole.exact else limit(RUNS)
    began = f"resumed after step {interruption.place} of {interruption.total}, training ended"
    if worst.x_noise <= allowed:
        message = f"{began} where it ends uninterrupted ({times(worst.x_noise)})"
        return found("checkpoint", Outcome.PASSED, message, worst, allowed)
    message = (
        f"{began} {times(worst.x_noise)} from where it ends uninterrupted ({worst.where}), though each of its steps "
        "was right in itself"
    )
    finding = found("checkpoint", Outcome.FAILED, message, worst, allowed)
    return replace(finding, cause=UNEXPLAINED, family="checkpoint", parameters=by_parameter(errors))


def _refuse_blindness(interruption: Interruption) -> None:
    """Raise where a trainer that had lost everything would have passed."""
    left, start = interruption.left(0)[0], interruption.whole.start
    if all(name not in left or torch.equal(left[name], value) for name, value in start.items()):
        raise Vacuous("no weight had moved when training was interrupted, so nothing could be lost")
    steps = [step for trace in interruption.resumed.trace.ranks for step in trace.steps]
    if all(same(step.before, step.after) for step in steps):
        raise Vacuous("no weight moved after training was resumed")
    alone = functools.reduce(larger, replay(interruption.resumed.trace.ranks[0], interruption.resumed), Deviation(0.0))
    if alone.x_noise <= _limit(interruption):
        raise Vacuous("an optimizer that had lost its state would have made the same weights")


def _limit(interruption: Interruption) -> float:
    return 0.0 if interruption.whole.exact else limit(DRAWS)


def _is_bad(check: Callable[[TraceAnalysis], Finding | None], analysis: TraceAnalysis) -> bool:
    try:
        finding = check(analysis)
    except Vacuous:
        return True
    return finding is not None and finding.outcome.is_bad
