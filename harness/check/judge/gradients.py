"""Whether each optimizer received the mean over ranks of what the backward passes of its step computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.check.evidence.training import RecordedStep, RecordedTraining
from harness.check.judge.changed_by_hand import settled
from harness.check.judge.gradient_case import SKETCH_MARGIN, Combination, Fit, ReceivedGradient
from harness.check.judge.gradient_hypotheses import HYPOTHESES
from harness.check.judge.noted import listed
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.causes.hypothesis import Evidence, Hypothesis, Match, explained

CHECK = "gradients"


def judge_gradients(training: RecordedTraining) -> Iterator[Finding]:
    """Yield one finding: all gradients are right, or the worst one and its cause."""
    cases = list(received_gradients(training))
    judged = [(case, right_combination(case)) for case in cases if case.is_judged]
    if not judged:
        yield Finding(CHECK, Outcome.SKIPPED, f"no gradients were judged: {_why_none(training, cases)}")
        return
    fits = [(case, right, case.fit(right)) for case, right in judged]
    wrong = [(case, right, fit) for case, right, fit in fits if not fit.holds]
    if not wrong:
        noise = [case.times_noise(right, fit.factor) for case, right, fit in fits]
        yield Finding(
            CHECK,
            Outcome.PASSED,
            f"every gradient that an optimizer received is {_mean(judged[0][0])}{_removed(judged)}",
            error_x_noise=max((value for value in noise if value is not None), default=None),
            limit_x_noise=2.0,
        )
        return
    finding = explained(_finding(*wrong[0], wrong), HYPOTHESES, _Wrong(wrong))
    yield settled(finding, [case for case, _, _ in wrong], training)


def received_gradients(training: RecordedTraining) -> Iterator[ReceivedGradient]:
    """Yield each rank's gradient of each step that was taken, where all ranks recorded the step."""
    previous: dict[tuple[int, int], RecordedStep] = {}
    hook_format = _hook_format(training)
    for place in range(min((len(rank.steps) for rank in training.ranks), default=0)):
        ranks = training.at(place)
        alike = {(step.optimizer, step.number, len(step.parameters)) for step in ranks.values()}
        if len(alike) > 1 or len(ranks) < training.world_size:
            return
        for rank, step in ranks.items():
            if not step.skipped:
                before = previous.get((rank, step.optimizer))
                yield ReceivedGradient(place, rank, ranks, before, hook_format=hook_format)
            previous[rank, step.optimizer] = step


def right_combination(case: ReceivedGradient) -> Combination:
    """Return what is right: the mean over ranks of the passes that belong to the step.

    Where passes of other optimizers' steps left gradients in the same parameters and nobody zeroed them, they are part
    of what the optimizer is meant to receive: two optimizers may step at different frequencies.
    """
    right = case.evenly()
    if not any(step.other_passes for step in case.ranks.values()) or case.fit(right).holds:
        return right
    ranks = {rank: replace(step, passes=step.other_passes + step.passes) for rank, step in case.ranks.items()}
    whole = replace(case, ranks=ranks)
    wider = whole.evenly()
    more = whole.value(wider) - case.value(right)
    together = Combination(right.coefficients, more)
    return together if case.fit(together).holds else right


def _hook_format(training: RecordedTraining) -> str:
    """Return the format to which a communication hook of torch rounds gradients, "" without one."""
    hooks = [name for rank in training.ranks for name in rank.facts.get("precision", {}).get("hooks", ())]
    if any("bf16" in name for name in hooks):
        return "bfloat16"
    return "float16" if any("fp16" in name for name in hooks) else ""


@dataclass(frozen=True, eq=False)
class _Wrong(Evidence):
    """Every wrong gradient: a hypothesis has to fit all of them."""

    wrong: Iterable[tuple[ReceivedGradient, Combination, Fit]]

    def match(self, hypothesis: Hypothesis[Any, Any]) -> Match | None:
        """Return how a hypothesis fits, with the texts' figures of the first wrong gradient."""
        first: ReceivedGradient | None = None
        factor = 1.0
        for case, right, _ in self.wrong:
            fitting = [choices for choices in hypothesis.predict(case) if _fits(case, choices)]
            if not fitting:
                return None
            if first is None:
                first = case
                factor = _factor(case, right)
        return None if first is None else Match(first.place, first.rank, _figures(first, factor))


def _fits(case: ReceivedGradient, choices: Iterable[Combination]) -> bool:
    """Return whether each parameter fits one of the choices."""
    least = None
    for choice in choices:
        ratios, _ = case.errors(choice)
        least = ratios if least is None else least.minimum(ratios)
    return least is not None and float(least.max()) <= SKETCH_MARGIN


def _finding(
    case: ReceivedGradient,
    right: Combination,
    fit: Fit,
    wrong: list[tuple[ReceivedGradient, Combination, Fit]],
) -> Finding:
    expected, received = case.value(right), case.received
    size, length = float(expected.norm()), float(received.norm())
    cosine = float(expected @ received) / (size * length) if size and length else 0.0
    where = f"{case.location} and {len(wrong) - 1} more" if len(wrong) > 1 else case.location
    return Finding(
        CHECK,
        Outcome.FAILED,
        f"gradients at {where} are not {_mean(case)}: {length / size if size else float('inf'):.4g} × their length, "
        f"cosine {cosine:.4f}",
        error_x_noise=case.times_noise(right, 1.0),
        step=case.place,
        parameter=case.parameters[fit.worst].name,
        rank=case.rank,
        limit_x_noise=2.0,
    )


def _factor(case: ReceivedGradient, right: Combination) -> float:
    value = case.value(right)
    square = float(value @ value)
    return float(case.received @ value) / square if square else 0.0


def _figures(case: ReceivedGradient, factor: float) -> Mapping[str, object]:
    scale = case.step.passes[-1].scale if case.step.passes else 1.0
    return {"world": case.world, "passes": case.passes, "rank": case.rank, "scale": scale, "factor": f"{factor:.4g}"}


def _mean(case: ReceivedGradient) -> str:
    over = [f"the mean over {case.world} ranks of" if case.world > 1 else "", "what the backward passes computed"]
    return " ".join(filter(None, over))


def _removed(judged: Iterable[tuple[ReceivedGradient, Combination]]) -> str:
    names = {one.name for case, _ in judged for one, gone in zip(case.parameters, case.removed, strict=True) if gone}
    if not names:
        return ""
    return f"; the script sets those of {listed(sorted(names))} to None before a step, which leaves them as they are"


def _why_none(training: RecordedTraining, cases: list[ReceivedGradient]) -> str:
    if not any(rank.steps for rank in training.ranks):
        return "no optimizer stepped"
    if len(training.ranks) < training.world_size:
        return f"only {len(training.ranks)} of {training.world_size} ranks recorded steps"
    if not cases:
        return "ranks took different steps, or every step was skipped"
    if not any(case.passes for case in cases):
        return _why_unreached(training)
    return "gradients were not finite"


def _why_unreached(training: RecordedTraining) -> str:
    """Return why no gradient arrived: what keeps the optimizer's parameters apart from those of the model."""
    names = [one.name for rank in training.ranks for step in rank.steps for one in step.parameters]
    if any("_fsdp_wrapped_module" in name or "_flat_param" in name for name in names):
        return "FullyShardedDataParallel (FSDP1) cannot be followed; fully_shard (FSDP2) can"
    return (
        "no backward pass reached the optimizer's parameters; their gradients cannot be followed where they are copied "
        "from other tensors, such as master weights, or come from torch.autograd.grad or torch.func"
    )
