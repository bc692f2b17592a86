"""Tells a wrong adapter from a wrong trainer by the trace of a tiny cell.

An adapter is wrong if nothing can be judged: there is no trace, or the trace is not of the training that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from plumbline.core.cell import Cell
from plumbline.core.errors import ADAPTER_WRONG, RIGHT, TRAINER_WRONG
from plumbline.core.finding import Finding, in_reading_order
from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome, worst
from plumbline.evidence.trace import Step, Tensors, Trace
from plumbline.judge.causes.launch import SEE_LOG
from plumbline.judge.causes.stage_pattern import ranks_in_words
from plumbline.report.text import shortened, without_hint

_WRONG = "The adapter is wrong: "
_LONGEST = 120
"""Maximum length of the message of a finding that is a consequence of another finding."""


@dataclass(frozen=True)
class SmokeEvidence:
    """The trace of a cell, its findings, and the initial weights of ``job.model()``."""

    cell: Cell
    trace: Trace
    findings: tuple[Finding, ...]
    initial: Tensors

    @property
    def steps(self) -> list[Step]:
        return [step for rank in self.trace.ranks for step in rank.steps]

    @property
    def moved(self) -> bool:
        finals = [rank.final for rank in self.trace.ranks if rank.final is not None]
        return any(
            not torch.equal(final[name], self.initial[name].to(final[name].dtype)) for final in finals for name in final
        )


@dataclass(frozen=True)
class AdapterVerdict:
    """Whether the adapter or the trainer is wrong, as an exit code, and why, most important sentence first."""

    code: int
    sentences: tuple[str, ...]


def diagnose(evidence: SmokeEvidence) -> AdapterVerdict:
    """Return whether the adapter is wrong or, if it is right, whether the trainer is wrong."""
    for problem in _PROBLEMS if evidence.trace.is_whole else (_ended_badly,):
        if sentence := problem(evidence):
            return AdapterVerdict(ADAPTER_WRONG, (f"{_WRONG}{sentence}",))
    bad = [finding for finding in in_reading_order(evidence.findings) if finding.outcome.is_bad]
    if bad:
        return AdapterVerdict(TRAINER_WRONG, (*_right_adapter(evidence), *_wrong_trainer(bad)))
    return AdapterVerdict(RIGHT, (*_right_adapter(evidence), _right_trainer(evidence)))


def refused(verdict: AdapterVerdict, evidence: SmokeEvidence, plain: Cell) -> AdapterVerdict:
    """Return the verdict on a further cell, given that ``plain`` was right.

    If the further cell ends before any step, the subject wrongly declares its backend or precision.
    """
    if verdict.code != ADAPTER_WRONG or evidence.trace.is_whole or evidence.steps:
        return verdict
    cell = evidence.cell
    what, declared = ("backend", cell.backend) if cell.backend != plain.backend else ("precision", cell.precision)
    advice = (
        f"it declares {what} {declared!r}, but fails with this {what}. Support it, or remove it from @subject(...)."
    )
    earlier = (sentence.removeprefix(_WRONG) for sentence in verdict.sentences)
    return AdapterVerdict(ADAPTER_WRONG, (f"{_WRONG}{advice}", *earlier))


def _ended_badly(evidence: SmokeEvidence) -> str | None:
    broken = next(finding for finding in evidence.findings if finding.check == "launch")
    # The rest is in the log, which the command prints.
    error = without_hint(broken.message.partition("\n")[0], SEE_LOG)
    idle = [rank.rank for rank in evidence.trace.ranks if not rank.steps and not rank.error]
    if idle:
        return (
            f"train(job) returned on {ranks_in_words(idle)} without an optimizer step, and the other ranks could not "
            f"finish. Every rank must take part. {error}"
        )
    if broken.family != "launch":
        return None
    how = {Outcome.CRASHED: "died", Outcome.TIMED_OUT: "hung"}.get(broken.outcome, "raised")
    steps = max((len(rank.steps) for rank in evidence.trace.ranks), default=0)
    when = f"after optimizer step {steps}" if steps else "before the first optimizer step"
    return f"train(job) {how} {when}, so nothing can be judged. {error}"


def _no_model(evidence: SmokeEvidence) -> str | None:
    if any(rank.final is not None for rank in evidence.trace.ranks):
        return None
    return "job.model() was never called. Train the model that it returns; you may wrap it."


def _only_some_ranks(evidence: SmokeEvidence) -> str | None:
    busy = [rank.rank for rank in evidence.trace.ranks if rank.steps]
    idle = [rank.rank for rank in evidence.trace.ranks if not rank.steps]
    if not busy or not idle:
        return None
    return (
        f"{ranks_in_words(busy)} trained, but {ranks_in_words(idle)} took no step. "
        "Every rank calls train(job) in its own process and must take part."
    )


def _no_step(evidence: SmokeEvidence) -> str | None:
    if evidence.steps:
        return None
    if evidence.moved:
        return (
            "the weights changed, but no optimizer step was recorded. Only steps of a torch.optim.Optimizer are "
            "recorded: use job.optimizer(...)."
        )
    if any(rank.evaluations for rank in evidence.trace.ranks):
        return "the model was evaluated, but no optimizer stepped. Train it before train(job) returns."
    return "no optimizer stepped: train(job) returned before training, or does not call optimizer.step()."


def _alone(evidence: SmokeEvidence) -> str | None:
    worlds = {rank.world_size for rank in evidence.trace.ranks}
    if worlds == {evidence.cell.processes}:
        return None
    sizes = " and ".join(map(str, sorted(worlds)))
    return (
        f"{evidence.cell.processes} ranks were launched, but each had a world size of {sizes}. "
        "Call torch.distributed.init_process_group(job.comm), or let the trainer read torchrun's environment variables."
    )


def _other_samples(evidence: SmokeEvidence) -> str | None:
    if any(micro.samples for step in evidence.steps for micro in step.micro_batches):
        return None
    if not evidence.moved:
        return (
            "the optimizer steps, but job.model() was neither called nor changed: another model is trained. "
            "Call job.model() once and train the model that it returns."
        )
    return (
        "the model was never called with a whole batch. Give it the dict that job.dataset returns: "
        'its "index" shows which samples are used.'
    )


def _other_parameters(evidence: SmokeEvidence) -> str | None:
    any_gradient = any(gradient.any() for step in evidence.steps for gradient in step.gradients.values())
    if evidence.moved:
        if any(step.gradients for step in evidence.steps):
            return None
        return (
            "the weights changed, but the optimizer's parameters are not those of job.model(), so no gradient was "
            "recorded. Pass model.parameters(), neither flattened nor copied."
        )
    # If no weight should have changed, unchanged weights prove nothing.
    if not any(any(step.learning_rates) and not step.skipped for step in evidence.steps):
        return None
    if any_gradient:
        return (
            "the optimizer steps, but the weights of job.model() do not change: the optimizer has the parameters of a "
            "copy, or of an earlier job.model(). Call job.model() once and train that model."
        )
    if any(step.gradients for step in evidence.steps):
        return None
    return (
        "the optimizer steps, but gets no gradient of job.model(), and the weights do not change. Pass it "
        "model.parameters(), and call backward() between zero_grad() and step()."
    )


_PROBLEMS: tuple[Callable[[SmokeEvidence], str | None], ...] = (
    _no_model,
    _only_some_ranks,
    _no_step,
    _alone,
    _other_samples,
    _other_parameters,
)
"""In order: a problem can also cause the later ones."""


def _right_adapter(evidence: SmokeEvidence) -> Iterator[str]:
    if not evidence.trace.is_whole:
        yield "The adapter seems right: the training ended because of a known mistake in trainers."
        return
    ranks, steps = evidence.trace.ranks, len(evidence.trace.ranks[0].steps)
    samples = {i for step in evidence.steps for micro in step.micro_batches for i in micro.samples}
    who = counted(len(ranks), "connected rank") if len(ranks) > 1 else "1 rank"
    yield (f"The adapter is right: {who}, {counted(steps, 'optimizer step')}, {counted(len(samples), 'sample')}.")
    if all(micro.loss is None for step in evidence.steps for micro in step.micro_batches):
        yield "job.loss was not called: the trainer uses its own loss, which must give the same values."


def _wrong_trainer(bad: list[Finding]) -> Iterator[str]:
    yield "The trainer is wrong:"
    for finding in bad:
        if finding.consequence_of is None:
            yield f"- {finding.check}: {finding.outcome.value}: {finding.message}"
        else:
            message = shortened(finding.message, _LONGEST)
            yield f"  - consequence of {finding.consequence_of}: {finding.check}: {message}"


def _right_trainer(evidence: SmokeEvidence) -> str:
    checks = sum(finding.outcome in (Outcome.PASSED, Outcome.DEVIATES) for finding in evidence.findings)
    if worst(finding.outcome for finding in evidence.findings) is Outcome.DEVIATES:
        promise = f"what {evidence.cell.backend} promises, which differs from one device"
    else:
        promise = "what one device computes"
    return f"The trainer is right here: it computes {promise} ({counted(checks, 'check')})."
