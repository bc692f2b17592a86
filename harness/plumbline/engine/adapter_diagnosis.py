"""Tells a wrong adapter from a wrong trainer, from the trace of a tiny cell. Nothing runs here.

An adapter is wrong where nothing can be judged: there is no trace, or it is the trace of another training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from plumbline.core.cell import Cell
from plumbline.core.exit_codes import ADAPTER_WRONG, RIGHT, TRAINER_WRONG
from plumbline.core.finding import Finding, in_reading_order
from plumbline.core.outcome import Outcome, worst
from plumbline.evidence.trace import Step, Tensors, Trace
from plumbline.report.text import shortened

_WRONG = "The adapter is wrong: "
_LONGEST = 120
"""The number of characters that are shown of a finding that another one explains."""


@dataclass(frozen=True)
class SmokeEvidence:
    """The trace of a cell and its findings.

    ``initial`` are the initial weights of ``job.model()``. ``calls`` is the number of calls of the model, counted only
    where no optimizer stepped, else None.
    """

    cell: Cell
    trace: Trace
    findings: tuple[Finding, ...]
    initial: Tensors
    calls: int | None = None

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
    """Whether the adapter or the trainer is wrong, as an exit code, and why: the most important sentence first."""

    code: int
    sentences: tuple[str, ...]


def diagnose(evidence: SmokeEvidence) -> AdapterVerdict:
    """Return whether the adapter is wrong, and only if it is not, whether the trainer is."""
    for problem in _PROBLEMS if evidence.trace.is_whole else (_ended_badly,):
        if sentence := problem(evidence):
            return AdapterVerdict(ADAPTER_WRONG, (f"{_WRONG}{sentence}",))
    bad = [finding for finding in in_reading_order(evidence.findings) if finding.outcome.is_bad]
    if bad:
        return AdapterVerdict(TRAINER_WRONG, (*_right_adapter(evidence), *_wrong_trainer(bad)))
    return AdapterVerdict(RIGHT, (*_right_adapter(evidence), _right_trainer(evidence)))


def refused(verdict: AdapterVerdict, evidence: SmokeEvidence, plain: Cell) -> AdapterVerdict:
    """Return the verdict on a further cell, where ``plain`` was right: an error only there is a wrong declaration."""
    if verdict.code != ADAPTER_WRONG or evidence.trace.is_whole or evidence.steps:
        return verdict
    cell = evidence.cell
    what, declared = ("backend", cell.backend) if cell.backend != plain.backend else ("precision", cell.precision)
    advice = f"it declares {what} {declared!r}, but fails with it. Remove it from @subject(...), or support it."
    earlier = (sentence.removeprefix(_WRONG) for sentence in verdict.sentences)
    return AdapterVerdict(ADAPTER_WRONG, (f"{_WRONG}{advice}", *earlier))


def _ended_badly(evidence: SmokeEvidence) -> str | None:
    broken = next(finding for finding in evidence.findings if finding.check == "launch")
    error = broken.message.partition(": see the rank's log")[0].partition("; it said last:")[0]
    idle = [rank.rank for rank in evidence.trace.ranks if not rank.steps and not rank.error]
    if idle:
        return (
            f"train(job) returned on rank {_listed(idle)} without an optimizer step, and the other ranks could not "
            f"finish without it. Every rank has to take part. {error}"
        )
    if broken.family != "launch":
        return None
    how = {Outcome.CRASHED: "died", Outcome.TIMED_OUT: "hangs"}.get(broken.outcome, "raised")
    steps = max((len(rank.steps) for rank in evidence.trace.ranks), default=0)
    when = f"after optimizer step {steps}" if steps else "before an optimizer stepped"
    return f"train(job) {how} {when}, and nothing can be judged. {error}"


def _no_model(evidence: SmokeEvidence) -> str | None:
    if any(rank.final is not None for rank in evidence.trace.ranks):
        return None
    return "job.model() was never called. Train the model that it returns, wrapped as you like: its weights are judged."


def _only_some_ranks(evidence: SmokeEvidence) -> str | None:
    busy = [rank.rank for rank in evidence.trace.ranks if rank.steps]
    idle = [rank.rank for rank in evidence.trace.ranks if not rank.steps]
    if not busy or not idle:
        return None
    return (
        f"only rank {_listed(busy)} trained, rank {_listed(idle)} made no step. "
        "Every rank calls train(job) in a process of its own, and all of them take part."
    )


def _no_step(evidence: SmokeEvidence) -> str | None:
    if evidence.steps:
        return None
    if evidence.moved:
        return (
            "weights moved, but no optimizer was seen stepping. Steps are seen where a torch.optim.Optimizer makes "
            "them: use job.optimizer(...), or one whose step() torch's global step hooks reach."
        )
    if any(rank.evaluations for rank in evidence.trace.ranks):
        return "the model was only evaluated: no backward went through it, and no optimizer ever stepped."
    if evidence.calls == 0:
        return "train(job) returned before training: the model was never called, and no optimizer stepped."
    if evidence.calls:
        return f"the model was called {evidence.calls} times, but no optimizer ever stepped."
    return "no optimizer ever stepped: either train(job) returned before training, or step() is not called."


def _alone(evidence: SmokeEvidence) -> str | None:
    worlds = {rank.world_size for rank in evidence.trace.ranks}
    if worlds == {evidence.cell.processes}:
        return None
    return (
        f"{evidence.cell.processes} ranks were launched, but each trained in a world of {_listed(sorted(worlds))}. "
        "Call torch.distributed.init_process_group(job.comm), or let the trainer read torchrun's variables, which are "
        "set."
    )


def _other_samples(evidence: SmokeEvidence) -> str | None:
    if any(micro.samples for step in evidence.steps for micro in step.micro_batches):
        return None
    if not evidence.moved:
        return (
            "the optimizer steps, but job.model() was neither called nor changed: another model is trained. "
            "Train the one that job.model() returns, and call it once."
        )
    return (
        "job.model() was never called with a batch. Give it the whole dict, as job.dataset has it: "
        'its "index" tells which samples are used, and no sample was seen.'
    )


def _other_parameters(evidence: SmokeEvidence) -> str | None:
    any_gradient = any(gradient.any() for step in evidence.steps for gradient in step.gradients.values())
    if evidence.moved:
        if any(step.gradients for step in evidence.steps):
            return None
        return (
            "weights moved, but the optimizer's parameters are not those of job.model(), so no gradient was seen. "
            "Give it model.parameters(), neither flattened nor copied."
        )
    # Where nothing should change, unchanged weights prove nothing about whose parameters they are.
    if not any(any(step.learning_rates) and not step.skipped for step in evidence.steps):
        return None
    if any_gradient:
        return (
            "the optimizer steps, but the weights of job.model() do not change: it has the parameters of a copy, "
            "or of an earlier job.model(). Call job.model() once, and train that very object."
        )
    if any(step.gradients for step in evidence.steps):
        return None
    return (
        "the optimizer steps, but it gets no gradient of job.model(), whose weights do not change. Either it has "
        "other parameters (make it of model.parameters()), or no backward lies between zero_grad() and step()."
    )


_PROBLEMS: tuple[Callable[[SmokeEvidence], str | None], ...] = (
    _no_model,
    _only_some_ranks,
    _no_step,
    _alone,
    _other_samples,
    _other_parameters,
)
"""In this order: a problem causes those after it as well."""


def _right_adapter(evidence: SmokeEvidence) -> Iterator[str]:
    if not evidence.trace.is_whole:
        yield "The adapter seems right: what ended this training is a known mistake of trainers."
        return
    ranks, steps = evidence.trace.ranks, len(evidence.trace.ranks[0].steps)
    samples = {i for step in evidence.steps for micro in step.micro_batches for i in micro.samples}
    who = f"{len(ranks)} ranks that know of each other" if len(ranks) > 1 else "one rank"
    yield f"The adapter is right: {who}, optimizer steps: {steps}, samples: {len(samples)}."
    if all(micro.loss is None for step in evidence.steps for micro in step.micro_batches):
        yield "job.loss was not called: the trainer has a loss of its own, which is fine if it computes the same."


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
        promise = f"exactly what {evidence.cell.backend} promises, which is not what one device computes"
        return f"The trainer is right here: it computes {promise} ({checks} checks)."
    return f"The trainer is right here: it computes what one device computes ({checks} checks)."


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
