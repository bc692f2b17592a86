"""Judges a training, of a subject or of a script: runs its checks and returns their findings."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from plumbline.core.finding import RAISED, VACUOUS, Finding, in_reading_order
from plumbline.core.outcome import Outcome
from plumbline.evidence.training_record import TrainingRecord
from plumbline.judge.causes.launch import LaunchCase
from plumbline.judge.causes.step_count import VacuousCase
from plumbline.judge.checks import CHECKS, Check, checks_of
from plumbline.judge.checks.launch import details, launch, with_hung_ranks
from plumbline.judge.consequences import RULES, Rule, mark_consequences
from plumbline.judge.findings import Vacuous
from plumbline.judge.hypothesis import explain
from plumbline.judge.oracle.noise import is_finite, length
from plumbline.judge.trace_analysis import TraceAnalysis

BY_STEP, OVER_ALL = ("gradients", "update", "training"), ("buffers", "metrics", "checkpoint")
"""The checks that cannot compare numbers that are out of range. Those by step still judge the steps before."""


def run_checks(evidence: TrainingRecord) -> list[Finding]:
    """Return what every check finds, in the order of the registry."""
    checks = checks_of(type(evidence))
    return [finding for name, check in checks.items() for finding in run_check(name, check, evidence)]


def run_check(name: str, check: Check, evidence: TrainingRecord) -> Iterator[Finding]:
    """Yield what one check finds. If it raises, its earlier findings remain, and one without a verdict follows."""
    try:
        found = check(evidence)
        if found is not None:
            yield from [found] if isinstance(found, Finding) else found
    except Vacuous as reason:
        finding = Finding(name, Outcome.ERRORED, f"{VACUOUS} (this check could not have failed): {reason}")
        yield explain(finding, VacuousCase(evidence)) if isinstance(evidence, TraceAnalysis) else finding
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raised = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
        yield Finding(name, Outcome.ERRORED, f"{RAISED}{raised}")


@dataclass(frozen=True)
class Kind:
    """How trainings of one kind are judged, besides their checks.

    ``rules`` and ``same_cause`` are arguments of ``mark_consequences``. ``run`` returns the findings.
    """

    rules: Sequence[Rule]
    same_cause: bool
    run: Callable[[Any], list[Finding]] = run_checks


def judge(training: TrainingRecord) -> tuple[Finding, ...]:
    """Run every check of a training of any kind in ``KINDS``.

    Findings are in reading order: root causes before their consequences.
    """
    kind = next(KINDS[each] for each in type(training).__mro__ if each in KINDS)
    return tuple(in_reading_order(mark_consequences(kind.run(training), kind.rules, same_cause=kind.same_cause)))


def _of_subject(analysis: TraceAnalysis) -> list[Finding]:
    """Return the findings about a subject's trace, independent of the state of the global RNG.

    An incomplete trace (a rank raised, crashed or hung) is not judged further: the finding says how the launch ended.
    """
    trace, cell = analysis.whole_trace, analysis.cell
    broken = launch(trace, cell)
    if broken is not None:
        explained = explain(broken, LaunchCase(broken, trace, cell))
        return [replace(explained, message=f"{explained.message}\n{details(broken, trace)}".strip())]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(analysis.workload.seed)
        findings = run_checks(analysis)
        if any(map(_is_of_numbers, findings)) and (step := _diverged_at(analysis)) is not None:
            begun = replace(trace, ranks=tuple(replace(rank, steps=rank.steps[:step]) for rank in trace.ranks))
            until = TraceAnalysis(begun, analysis.workload, cell, analysis.behavior)
            findings = [_before(step, one, until) if _is_of_numbers(one) else one for one in findings]
    return with_hung_ranks(findings, trace) if trace.hung else findings


def _is_of_numbers(finding: Finding) -> bool:
    """Return whether a finding reports wrong numbers, which may be out of range on one device too."""
    return finding.check in (*BY_STEP, *OVER_ALL) and finding.outcome.is_bad


def _diverged_at(analysis: TraceAnalysis) -> int | None:
    """Return the first step at which one device's gradient, or the norm that clips it, is not finite either.

    Both are computed at the subject's own weights. None if there is none, or if the loss is scaled: then overflows come
    from the scale, and their steps are skipped.
    """
    with suppress(Exception):  # nothing can be computed from this evidence: the checks have reported that
        oracle = analysis.cell_oracle
        longest = math.sqrt(torch.finfo(oracle.dtype).max)  # clipping by a larger norm leaves zeros
        for step in analysis.steps_taken:
            if step.ranks[0].scale or not is_finite(step.ranks[0].before):
                break
            analysis.load_step(oracle, step)
            if not is_finite(oracle.gradient(analysis.layouts[step.index])):
                return step.index
            if analysis.workload.clip_norm is not None and length(analysis.expected[step.index].raw) > longest:
                return step.index
    return None


def _before(step: int, finding: Finding, until: TraceAnalysis) -> Finding:
    if finding.check in BY_STEP:
        for earlier in run_check(finding.check, CHECKS[TraceAnalysis][finding.check], until):
            if earlier.outcome is Outcome.FAILED:
                return earlier
    vacuous = (
        f"{VACUOUS}: the training diverges. In precision {until.cell.precision} on one device, the gradient at step "
        f"{step}, or the norm that clips it, is not finite either; lower the learning rate, or clip gradients"
    )
    return Finding(finding.check, Outcome.ERRORED, vacuous, step=step)


KINDS: dict[type, Kind] = {TraceAnalysis: Kind(RULES, same_cause=True, run=_of_subject)}
"""The kinds of trainings that can be judged; ``plumbline.check.judge`` adds those of scripts."""
