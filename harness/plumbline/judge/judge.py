"""Judges a training, of a subject or of a script: runs its checks, and marks findings that follow from others."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from plumbline.core.finding import ORDER, RAISED, UNEXPLAINED, VACUOUS, Finding, in_reading_order, is_unexplained
from plumbline.core.outcome import Outcome
from plumbline.evidence.training_record import TrainingRecord
from plumbline.judge.causes.launch import LaunchCase
from plumbline.judge.causes.step_count import VacuousCase
from plumbline.judge.checks import CHECKS, Check, checks_of
from plumbline.judge.checks.launch import details, launch, with_hung_ranks
from plumbline.judge.findings import Information, Vacuous, with_hint
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(analysis.workload.seed)
        if broken is not None:
            explained = explain(broken, LaunchCase(broken, trace, cell))
            ended = replace(explained, message=f"{explained.message}\n{details(broken, trace)}".strip())
            return _stopped_by_divergence(ended, analysis) or [ended]
        findings = run_checks(analysis)
        if any(map(_is_of_numbers, findings)) and (step := _diverged_at(analysis)) is not None:
            until = _until(step, analysis)
            findings = [_before(step, one, until) if _is_of_numbers(one) else one for one in findings]
    return with_hung_ranks(findings, trace) if trace.hung else findings


def _stopped_by_divergence(ended: Finding, analysis: TraceAnalysis) -> list[Finding]:
    """Return the findings about a trainer that raised when its training diverged; empty if one device does not diverge.

    Some trainers, such as torchtitan's, refuse to go on with a loss that is not finite. The steps before are judged.
    """
    if not any(rank.error for rank in analysis.whole_trace.ranks) or (step := _diverged_at(analysis)) is None:
        return []
    until = _until(step, analysis)
    return [
        Finding("launch", Outcome.ERRORED, f"{_diverges(step, until)}\n{ended.message}", step=step),
        *(one for check in BY_STEP for one in _failed_before(check, until)),
    ]


def _until(step: int, analysis: TraceAnalysis) -> TraceAnalysis:
    trace = analysis.whole_trace
    begun = replace(trace, ranks=tuple(replace(rank, steps=rank.steps[:step]) for rank in trace.ranks))
    return TraceAnalysis(begun, analysis.workload, analysis.cell, analysis.behavior)


def _is_of_numbers(finding: Finding) -> bool:
    """Return whether a finding reports wrong numbers, which may be out of range on one device too."""
    return finding.check in (*BY_STEP, *OVER_ALL) and finding.outcome.is_bad


def _diverged_at(analysis: TraceAnalysis) -> int | None:
    """Return the first step at which one device's gradient, or its norm, is out of range too.

    Both are computed at the subject's own weights. None if there is none, or if the loss is scaled: then overflows come
    from the scale, and their steps are skipped.
    """
    with suppress(Exception):  # nothing can be computed from this evidence: the checks have reported that
        oracle = analysis.cell_oracle
        # A larger norm is infinite. Clipping by it leaves zeros, or NaN if the limit is infinite too, as in torchtitan.
        longest = math.sqrt(torch.finfo(oracle.dtype).max)
        for step in analysis.steps_taken:
            if step.ranks[0].scale or not is_finite(step.ranks[0].before):
                break
            analysis.load_step(oracle, step)
            if not is_finite(oracle.gradient(analysis.layouts[step.index])):
                return step.index
            if length(analysis.expected[step.index].raw) > longest:
                return step.index
    return None


def _before(step: int, finding: Finding, until: TraceAnalysis) -> Finding:
    if finding.check in BY_STEP:
        for earlier in _failed_before(finding.check, until):
            return earlier
    return Finding(finding.check, Outcome.ERRORED, _diverges(step, until), step=step)


def _failed_before(check: str, until: TraceAnalysis) -> Iterator[Finding]:
    yield from (one for one in run_check(check, CHECKS[TraceAnalysis][check], until) if one.outcome is Outcome.FAILED)


def _diverges(step: int, until: TraceAnalysis) -> str:
    return (
        f"{VACUOUS}: the training diverges. In precision {until.cell.precision} on one device, the gradient at step "
        f"{step}, or its norm, is out of range too; lower the learning rate, or clip gradients"
    )


NONE: Collection[str | None] = {None, UNEXPLAINED}
"""The causes of a finding without a known cause."""

PACE: Collection[str | None] = {
    "accumulates-unasked", "applied-once-a-rank", "parameter-in-several-optimizers", "short-last-window-dropped",
    "stepped-every-micro-batch", "stepped-without-a-batch", "window-over-the-end-of-the-epoch",
    "windows-of-another-length",
}  # fmt: skip
"""Causes by which optimizer steps cover other batches than the workload's steps."""

COUNTS: Collection[str | None] = {
    "batch-again", "batches-of-another-size", "drawn-twice-by-a-rank", "last-batch-filled-up", "local-rank-for-rank",
    "no-sampler", "node-rank-for-rank", "ranks-alike", "samples-never-seen", "shards-overlap",
}  # fmt: skip
"""Causes by which an epoch has more or fewer samples than it should. Causes about the order are not included."""

OF_ANOTHER_RANK: Collection[str | None] = {"optimizer-state-altered", "weights-not-restored", *NONE}
"""Causes of findings about a rank that resumes with the state of another rank from which it had diverged."""

STAGES_APART: Collection[str | None] = {"stage-never-stepped", "stage-stepped-again"}
"""Causes by which the n-th steps of ranks that hold one model together are not the same step."""


@dataclass(frozen=True)
class Rule:
    """A bad finding of ``check`` follows from one of ``origin``, for the reason in ``why``.

    None in a field means any value. ``causes``, ``families`` and ``outcome`` restrict the finding of ``check``, and
    ``origin_causes`` the finding of ``origin``. ``hint`` replaces the finding's hint. ``needed``: without a bad finding
    of ``origin`` the finding is no mistake. ``at_any_step``: the origin can begin at a later step than the finding.
    """

    check: str
    origin: str
    why: str
    causes: Collection[str | None] | None = None
    origin_causes: Collection[str | None] | None = None
    families: Collection[str | None] | None = None
    outcome: Outcome | None = None
    hint: str | None = None
    needed: bool = False
    at_any_step: bool = False

    def applies_to(self, finding: Finding) -> bool:
        """Return whether the rule is about ``finding``, regardless of the other findings.

        A check that raised has no cause, not even ``unexplained``: it has no verdict, so nothing explains it.
        """
        return (
            finding.check == self.check
            and not (finding.outcome is Outcome.ERRORED and finding.cause is None)
            and (self.causes is None or finding.cause in self.causes)
            and (self.families is None or finding.family in self.families)
            and (self.outcome is None or finding.outcome is self.outcome)
        )

    def explains(self, finding: Finding, origin: Finding) -> bool:
        """Return whether ``finding`` follows from ``origin``, which must not begin later unless ``at_any_step``."""
        return (
            origin.check == self.origin
            and self.applies_to(finding)
            and (self.origin_causes is None or origin.cause in self.origin_causes)
            and (self.at_any_step or origin.step is None or finding.step is None or origin.step <= finding.step)
        )


_SCALES: Collection[str | None] = {None, "accumulation", "averaging", "loss-normalisation", "unused-params"}

RULES: tuple[Rule, ...] = (
    Rule("steps", "samples", "too many or too few samples make too many or too few batches",
         causes={"too-many-batches", "too-few-batches", "ranks-differ-in-steps", *NONE}, origin_causes=COUNTS),
    Rule("samples", "steps", "samples are counted by the steps that consumed them",
         causes={*PACE, *NONE}, origin_causes=PACE),
    Rule("gradients", "steps", "steps that cover other micro-batches divide by the wrong number",
         origin_causes=PACE, families=_SCALES),
    Rule("samples", "gradients", "the held-out set has other samples",
         origin_causes={"trained-on-held-out-data"}),
    Rule("gradients", "samples", "the sum over fewer micro-batches is divided by the number that is due",
         origin_causes={"micro-batches-missing"}, families=_SCALES),
    Rule("gradients", "samples", "ranks that use the same samples have the same gradient, averaged or not",
         origin_causes=COUNTS, causes=NONE, outcome=Outcome.ERRORED),
    *(
        Rule(check, "steps", "several optimizers step the same parameters",
             origin_causes={"parameter-in-several-optimizers"})
        for check in ("gradients", "learning-rate", "update")
    ),
    *(
        Rule(check, "steps", "the steps of stages are put together by their numbers", origin_causes=STAGES_APART)
        for check in ("initial-weights", "samples", "rng", "gradients", "learning-rate", "update", "stillness",
                      "ranks-agree", "buffers", "training")
    ),
    Rule("update", "learning-rate", "a stage that steps with other rates moves by them", causes={"rates-differ"}),
    Rule("learning-rate", "gradients", "an optimizer that steps nothing shows no rate",
         origin_causes={"parameter-not-in-optimizer"}),
    Rule("gradients", "rng", "a backward whose masks differ from the forward's does not compute the gradient",
         origin_causes={"masks-drawn-anew-in-the-backward"}, causes={"another-loss", *NONE}),
    Rule("gradients", "initial-weights", "ranks that hold different weights have no common gradient",
         origin_causes={"not-broadcast", "applied-once-a-rank", "parameters-missing"}, causes=NONE),
    Rule("gradients", "ranks-agree", "ranks that skipped alone hold different weights, which have no common gradient",
         origin_causes={"overflow-decided-alone"}, causes=NONE),
    Rule("gradients", "ranks-agree", "ranks that hold different weights have no common gradient",
         origin_causes={"rates-differ", "updates-differ", "changed-between-steps", "applied-once-a-rank"},
         causes=NONE),
    Rule("skipped-steps", "ranks-agree", "a rank skipped or stepped because it did not get the others' overflow flag",
         origin_causes={"overflow-decided-alone"}),
    Rule("update", "ranks-agree", "a rank stepped on an overflow that only another rank noticed",
         origin_causes={"overflow-decided-alone"}, causes={"not-finite"}),
    Rule("update", "gradients", "no update is right for a gradient that is not finite", causes={"not-finite"}),
    Rule("update", "gradients", "gradients of zero move nothing", outcome=Outcome.ERRORED,
         origin_causes={"zero", "parameter-not-in-optimizer"}),
    Rule("update", "gradients", "the workload's optimizer does not hold frozen parameters",
         origin_causes={"frozen-parameter-trained"}),
    Rule("update", "gradients", "weights kept in a lower precision are rounded after the step too",
         causes={"stored-in-lower-precision"},
         origin_causes={"computed-in-lower-precision", "computed-in-tf32", "rounded-to-16-bits"}),
    *(
        Rule(check, "precision", "the model computes with other weights than those that the optimizer steps",
             origin_causes={"not-copied-back"})
        for check in ("gradients", "buffers", "metrics", "training")
    ),
    Rule("precision", "initial-weights", "master weights that are not the job's are not the model's either",
         causes={"not-copied-back"}),
    Rule("stillness", "gradients", "averaging weights is visible only if the ranks' gradients had made them differ",
         causes={"weights-averaged"}, origin_causes={"not-synchronised"}),
    *(
        Rule("stillness", origin, "other ranks' steps change the weights between a rank's own",
             origin_causes={"applied-once-a-rank"})
        for origin in ("initial-weights", "update")
    ),
    Rule("initial-weights", "update", "a rank may begin with what another one has stepped in the same memory",
         causes={"initialised-anew", *NONE}, origin_causes={"applied-once-a-rank"}),
    Rule("ranks-agree", "gradients", "ranks that step with different gradients end with different weights",
         causes={"not-synchronised", "tied-gradients-not-added"}),
    Rule("ranks-agree", "learning-rate", "ranks that step with different rates end with different weights",
         causes={"rates-differ"}),
    Rule("ranks-agree", "initial-weights", "ranks that begin apart stay apart",
         causes={"not-broadcast"}),
    Rule("ranks-agree", "stillness", "weights that change apart from the steps part",
         causes={"changed-between-steps", "moved-when-skipped"}),
    Rule("ranks-agree", "update", "an update that is wrong on one rank parts it from the others",
         causes={"updates-differ"}),
    Rule("buffers", "validation", "an evaluation in training mode counts as training in the running statistics",
         origin_causes={"evaluated-in-training-mode"}),
    Rule("buffers", "gradients", "in evaluation mode no statistics are kept",
         origin_causes={"in-evaluation-mode"}),
    Rule("buffers", "gradients", "statistics that are shared for the forward are those that the buffers remember",
         origin_causes={"statistics-shared-forward-only"}, causes={"buffers-updated-otherwise", *NONE}),
    Rule("buffers", "gradients", "a forward that bypasses DistributedDataParallel broadcasts no buffers",
         origin_causes={"not-synchronised"}, causes={"buffers-not-broadcast"}),
    Rule("buffers", "steps", "statistics are followed from step to step", origin_causes=PACE),
    Rule("metrics", "ranks-agree", "ranks that hold different weights report losses of different models", causes=NONE),
    Rule("checkpoint", "ranks-agree", "what is saved of one rank is not what the others had", causes=OF_ANOTHER_RANK),
    Rule("checkpoint", "gradients", "the optimizers of ranks that are not synchronised remember different gradients",
         causes=OF_ANOTHER_RANK, origin_causes={"not-synchronised", "some-parameters-not-synchronised"}),
    Rule("metrics", "validation", "a loss over other samples, or in another mode, is another loss",
         causes={"other-mode", *NONE}),
    *(
        Rule("checkpoint", origin, "what is wrong without an interruption is not the checkpoint's", causes=NONE)
        for origin in ORDER
        if origin not in ("launch", "checkpoint", "training", "metrics", "validation")
    ),
    *(
        Rule("training", origin, "the final weights are the result of the steps", causes=NONE)
        for origin in ("initial-weights", "gradients", "learning-rate", "skipped-steps", "update", "stillness",
                       "ranks-agree", "steps", "rng")
    ),
)  # fmt: skip


_CLIPPED_FIRST: Collection[str | None] = {"clipped-before-averaging"}
_CLIPPED_HINT = "clip after the all-reduce: each rank clips its own gradient before it"

SCRIPT_RULES: tuple[Rule, ...] = (
    Rule("gradients", "clipping", "gradients are judged as they were clipped: of each rank's own samples",
         origin_causes=_CLIPPED_FIRST, hint=_CLIPPED_HINT, at_any_step=True),
    Rule("ranks-agree", "clipping", "gradients are judged as they were clipped: of each rank's own samples",
         origin_causes=_CLIPPED_FIRST, causes={"not-synchronised"}, hint=_CLIPPED_HINT, at_any_step=True),
    Rule("gradients", "clipping", "later micro-batches are added to clipped gradients",
         origin_causes={"clipped-every-micro-batch"}, causes={UNEXPLAINED, "exchanged-otherwise"},
         hint="clip once, after the last backward pass"),
    Rule("gradients", "clipping", "copies that are clipped by different factors part",
         origin_causes={"clipped-shard-by-shard"}),
    Rule("ranks-agree", "clipping", "copies that are clipped by different factors part",
         origin_causes={"clipped-shard-by-shard"}),
    Rule("ranks-agree", "clipping", "ranks that clip the same gradient to different limits part",
         origin_causes={"clipped-to-another-length"}, causes={"not-synchronised"}, at_any_step=True),
    Rule("ranks-agree", "learning-rate", "ranks that step with different rates end with different weights",
         origin_causes={"rates-differ", "settings-differ-between-ranks"}, causes={"updates-differ"}),
    Rule("ranks-agree", "gradients", "ranks whose gradients differ by design, as with averaged models, part",
         causes={"not-synchronised"}, needed=True, at_any_step=True),
    Rule("ranks-agree", "initial-weights", "ranks that begin apart stay apart",
         causes={"not-broadcast"}, needed=True, at_any_step=True),
)  # fmt: skip
"""The rules about a script, whose intended training is unknown."""


def mark_consequences(
    findings: Iterable[Finding], rules: Sequence[Rule] | None = None, *, same_cause: bool = True
) -> list[Finding]:
    """Return the findings about one training; each names the check whose consequence it is, if any.

    The rules are ``RULES`` by default. ``same_cause``: two findings with the same named cause are one mistake that two
    checks detected, and the finding of the later check is the consequence.
    """
    rules, findings = RULES if rules is None else rules, list(findings)
    places = {check: index for index, check in enumerate(ORDER)}
    bad = sorted((one for one in findings if one.outcome.is_bad), key=lambda one: places.get(one.check, len(ORDER)))
    origins: dict[str, str] = {}
    hints: dict[str, str | None] = {}
    for finding in bad:
        if rule := _explaining(finding, bad, origins, rules):
            origins[finding.check], hints[finding.check] = rule.origin, rule.hint
        elif same_cause and (twin := _twin(finding, bad, origins)):
            origins[finding.check] = twin
    judged = {one.check for one in findings if one.outcome is not Outcome.SKIPPED}
    return [_marked(one, origins, hints.get(one.check), rules, judged) for one in findings]


def _marked(
    finding: Finding, origins: dict[str, str], hint: str | None, rules: Sequence[Rule], judged: Collection[str]
) -> Finding:
    if finding.check in origins:
        finding = with_hint(finding, hint) if hint else finding
        return replace(finding, consequence_of=_root(finding.check, origins))
    missing = next((one.origin for one in rules if one.needed and one.applies_to(finding)), None)
    if missing is None or not finding.outcome.is_bad:
        return finding
    why = "found nothing wrong" if missing in judged else "has no verdict"
    message = f"{finding.message}; this does not count as wrong, because the check {missing} {why}"
    changed = {"outcome": Outcome.PASSED, "message": message, "cause": None, "family": None}
    return Information(**vars(finding) | changed)


def _explaining(
    finding: Finding, bad: Sequence[Finding], origins: dict[str, str], rules: Sequence[Rule]
) -> Rule | None:
    for rule in rules:
        for other in bad:
            since = replace(other, step=_since(other, bad, origins))
            if rule.explains(finding, since) and not _leads_to(other.check, finding.check, origins):
                return rule
    return None


def _twin(finding: Finding, bad: Sequence[Finding], origins: dict[str, str]) -> str | None:
    for other in bad[: bad.index(finding)]:
        if not is_unexplained(finding) and (other.cause, other.family) == (finding.cause, finding.family):
            return other.check if not _leads_to(other.check, finding.check, origins) else None
    return None


def _since(finding: Finding, bad: Sequence[Finding], origins: dict[str, str]) -> int | None:
    """Return the step at which a finding began: a consequence began with its origin, even if it is largest later."""
    steps, check = [finding.step], finding.check
    while check in origins:
        check = origins[check]
        steps += [one.step for one in bad if one.check == check]
    return min((step for step in steps if step is not None), default=None)


def _leads_to(check: str, wanted: str, origins: dict[str, str]) -> bool:
    """Return whether ``check`` is ``wanted`` or one of its consequences, because no finding explains itself."""
    while check in origins:
        check = origins[check]
        if check == wanted:
            return True
    return check == wanted


def _root(check: str, origins: dict[str, str]) -> str:
    while check in origins:
        check = origins[check]
    return check


KINDS: dict[type, Kind] = {TraceAnalysis: Kind(RULES, same_cause=True, run=_of_subject)}
"""The kinds of trainings that can be judged; ``plumbline.check.judge`` adds those of scripts."""
