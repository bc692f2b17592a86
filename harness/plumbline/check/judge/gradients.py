"""Whether each optimizer received the mean over ranks of what the backward passes of its step computed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.gradient_case import RIGHT, Fit, ReceivedGradient
from plumbline.check.judge.gradient_evidence import (
    ALIKE_PARTS,
    DISTRIBUTED,
    IN_PARTS,
    NOT_FINITE,
    NOT_FOLLOWED,
    REDUCED_IN_STEP,
    ZERO,
    GradientEvidence,
    gradient_evidence,
)
from plumbline.check.judge.manual_edits import excuse_manual_edits
from plumbline.check.judge.noted import listed, not_judged
from plumbline.check.judge.rank_layout import OBSERVER as LAYOUT
from plumbline.check.judge.shared_parameters import shared_numbers
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.causes.registry import explain
from plumbline.judge.findings import with_hint
from plumbline.judge.hypothesis import Evidence, Match
from plumbline.judge.mistakes.case import GradientMistake
from plumbline.judge.mistakes.combination import Combination, SomeParameters

CHECK = "gradients"

_WITHOUT_WRAPPER: Mapping[str, str] = {
    "not-synchronised": (
        "they were never all-reduced: wrap the model in DistributedDataParallel, or average the gradients over ranks "
        "between the backward pass and the step"
    ),
    "averaged-twice": "they are averaged already: remove one of the two divisions",
    "some-micro-batches-not-synchronised": "reduce the gradients of all micro-batches",
}
"""What to do in a script that has no DistributedDataParallel, by the cause: advice about one would mislead."""


def judge_gradients(training: RecordedTraining) -> Iterator[Finding]:
    """Yield one finding: all gradients are right, or the worst one and its cause."""
    evidence = gradient_evidence(training)
    judged = evidence.judged
    if not judged:
        yield Finding(CHECK, Outcome.SKIPPED, f"no gradients were judged: {_why_none(training, evidence)}")
        return
    if REDUCED_IN_STEP in evidence.unjudged:
        yield not_judged(CHECK, _of_optimizers(evidence.unjudged[REDUCED_IN_STEP]) + REDUCED_IN_STEP)
    fits = [(case, case.fit(RIGHT)) for case in judged]
    wrong = [(case, fit) for case, fit in fits if not fit.holds]
    if not wrong:
        noise = [case.in_noise(RIGHT, fit.factor) for case, fit in fits]
        largest = max((one for one in noise if one is not None), default=None)
        yield Finding(
            CHECK,
            Outcome.PASSED,
            f"every gradient that was judged is {_mean(judged[0])}{_removed(judged)}",
            error_x_noise=None if largest is None else largest.error,
            limit_x_noise=None if largest is None else largest.limit,
        )
        return
    if any(case.parts for case, _ in wrong):
        yield not_judged(CHECK, IN_PARTS, wrong[0][0].index)
        return
    cases = [case for case, _ in wrong]
    finding = _advised(explain(_finding(*wrong[0], cases), _Wrong.of(cases)), training)
    yield excuse_manual_edits(finding, cases, training)


@dataclass(frozen=True, eq=False)
class _Wrong(Evidence):
    """Every wrong gradient: a mistake has to fit all of them."""

    wrong: Sequence[ReceivedGradient]

    @classmethod
    def of(cls, wrong: Sequence[ReceivedGradient]) -> _Wrong:
        factor = statistics.median(map(_factor, wrong))
        return cls([replace(case, factor=factor) for case in wrong])

    @property
    def kind(self) -> type:
        """Mistakes predict from one case at a time."""
        return ReceivedGradient

    def match(self, mistake: GradientMistake) -> Match | None:
        """Return how a mistake fits, with the texts' figures of the first wrong gradient."""
        if all(any(_fits(case, one) for one in mistake.predict(case)) for case in self.wrong):
            first = self.wrong[0]
            return Match(first.index, first.rank, _figures(first))
        return None


def _advised(finding: Finding, training: RecordedTraining) -> Finding:
    other = _WITHOUT_WRAPPER.get(str(finding.cause))
    wrapped = any((rank.facts.get(LAYOUT) or {}).get("wrapped") for rank in training.ranks)
    return finding if other is None or wrapped else with_hint(finding, other)


def _fits(case: ReceivedGradient, prediction: Combination | SomeParameters | Match) -> bool:
    return isinstance(prediction, Match) or case.fits(prediction)


def _finding(
    case: ReceivedGradient,
    fit: Fit,
    wrong: Sequence[ReceivedGradient],
) -> Finding:
    expected, received = case.value(RIGHT), case.received
    size, length = float(expected.norm()), float(received.norm())
    cosine = float(expected @ received) / (size * length) if size and length else 0.0
    noise = case.in_noise(RIGHT, 1.0)
    if noise is not None and noise.error <= noise.limit:  # one wrong parameter, among many larger ones
        noise = case.in_noise(RIGHT, 1.0, fit.worst) or noise
    where = f"{case.location} and {len(wrong) - 1} more" if len(wrong) > 1 else case.location
    return Finding(
        CHECK,
        Outcome.FAILED,
        f"gradients at {where} are not {_mean(case)}: {length / size if size else float('inf'):.4g} × its length, "
        f"cosine {cosine:.4f}",
        error_x_noise=None if noise is None else noise.error,
        step=case.index,
        parameter=case.parameters[fit.worst].name,
        rank=case.rank,
        limit_x_noise=None if noise is None else noise.limit,
    )


def _factor(case: ReceivedGradient) -> float:
    value = case.value(RIGHT)
    square = float(value @ value)
    return float(case.received @ value) / square if square else 0.0


def _figures(case: ReceivedGradient) -> Mapping[str, object]:
    return {
        "world": case.world,
        "micro_batches": case.micro_batches,
        "accumulate": case.accumulate,
        "rank": case.rank,
        "scale": case.scale,
        "factor": f"{case.factor:.4g}",
    }


def _mean(case: ReceivedGradient) -> str:
    over = [f"the mean over {case.world} ranks of" if case.world > 1 else "", "what the backward passes computed"]
    return " ".join(filter(None, over))


def _removed(judged: Iterable[ReceivedGradient]) -> str:
    names = {one.name for case in judged for one, gone in zip(case.parameters, case.removed, strict=True) if gone}
    if not names:
        return ""
    return f"; the script sets those of {listed(sorted(names))} to None, so the step does not update these parameters"


def _why_none(training: RecordedTraining, evidence: GradientEvidence) -> str:
    if not any(rank.steps for rank in training.ranks):
        return "no optimizer stepped"
    if len(training.ranks) < training.world_size:
        return f"only {len(training.ranks)} of {training.world_size} ranks recorded steps"
    if not evidence.unjudged:
        return _why_no_case(training)
    why = next(
        why
        for why in (REDUCED_IN_STEP, DISTRIBUTED, ALIKE_PARTS, IN_PARTS, NOT_FINITE, ZERO, NOT_FOLLOWED)
        if why in evidence.unjudged
    )
    names = [one.name for case in evidence.unjudged[why] for one in case.parameters]
    if why == NOT_FOLLOWED and any("_fsdp_wrapped_module" in name or "_flat_param" in name for name in names):
        return "FullyShardedDataParallel (FSDP1) cannot be followed; use fully_shard (FSDP2)"
    return why


def _why_no_case(training: RecordedTraining) -> str:
    steps = training.at(0)
    if len({(step.optimizer, step.number) for step in steps.values()}) > 1:
        return "ranks stepped different optimizers, or at different times"
    if not any(shared_numbers(steps).values()):
        return (
            "no parameter is in every rank's optimizer: the ranks hold different parts of a model, as in a pipeline, "
            "which is not judged yet"
        )
    return "every step was skipped"


def _of_optimizers(cases: Iterable[ReceivedGradient]) -> str:
    names = dict.fromkeys(case.step.facts.get("update", {}).get("class") or "an optimizer" for case in cases)
    return f"{listed(names)}: "
