"""Which objective was optimised: with which weight each loss term of each micro-batch and rank counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from plumbline.check.evidence.training import RecordedRank, RecordedTraining
from plumbline.check.judge.micro_batches import CHECK, divided_wrongly, summed_micro_batches
from plumbline.check.judge.noted import amount, failed_observers, information
from plumbline.check.judge.rank_layout import rank_layout
from plumbline.check.judge.recorded_passes import passes_of
from plumbline.check.judge.step_objective import EXACT, NEAR, StepObjective, equals, spread, step_objectives
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.report.text import in_words

_PARTS = {0.5: "half of ", 2.0: "twice "}


def judge_objective(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what was optimised, or a division by the number of micro-batches that is missing or double."""
    yield from failed_observers(training, "objective", CHECK)
    if not any(step.passes for rank in training.ranks for step in rank.steps):
        return
    if any(step.weights_move_between_passes for rank in training.ranks for step in rank.steps):
        why = "the loss is not known: the weights change between the backward passes of a step"
        yield Finding(CHECK, Outcome.SKIPPED, why)
        return
    averaged = rank_layout(training).is_data_parallel
    # Ranks whose gradients are not averaged, as far as is known, have objectives of their own: the first one's is told.
    ranks = training.ranks if averaged else training.ranks[:1]
    objectives = list(step_objectives(ranks))
    if objectives and (wrong := divided_wrongly(objectives)) is not None:
        yield wrong
        return
    if (summed := summed_micro_batches(ranks)) is not None:
        yield summed
    if objectives:
        yield information(CHECK, _optimised(objectives))
    elif (several := _several_losses(ranks)) is not None:
        yield information(CHECK, several)
    elif summed is None:
        why = "the loss is not known: no backward pass started from a single loss of torch.nn.functional"
        yield Finding(CHECK, Outcome.SKIPPED, f"{why}{_tokens(ranks)}")


def _several_losses(ranks: Sequence[RecordedRank]) -> str | None:
    passes = [(one, one.facts.get("objective", {}).get("calls", ())) for rank in ranks for one in passes_of(rank)]
    kinds = {tuple(call["function"] for call in calls) for _, calls in passes}
    if len(kinds) != 1 or not (functions := kinds.pop()):
        return None
    terms = []
    for place, function in enumerate(functions):
        known = [(calls[place]["weight"], one.scale) for one, calls in passes]
        weights = sorted(weight / scale for weight, scale in known if weight is not None)
        if not weights:
            return None
        same = abs(weights[-1] - weights[0]) <= EXACT * abs(weights[-1])
        weight = _weight(weights[0]) + ("" if same else f" to {_weight(weights[-1])}")
        terms.append(function if weight == "1" else f"{weight} × {function}")
    return f"The loss of each backward pass is {' + '.join(terms)}."


def _tokens(ranks: Sequence[RecordedRank]) -> str:
    """Return what the numbers of labels say about a loss that is written by hand, "" where they were not counted."""
    counts = [
        sum(tokens)
        for rank in ranks
        for one in passes_of(rank)
        if (tokens := one.facts.get("objective", {}).get("tokens"))
    ]
    if not counts or not min(counts):
        return ""
    ratio = max(counts) / min(counts)
    return (
        f". Micro-batches have {amount(min(counts))} to {amount(max(counts))} labels: if each loss is the mean over "
        f"its own labels, a token counts up to {ratio:.3g} × as much as another"
    )


def _optimised(objectives: Sequence[StepObjective]) -> str:
    worst = max(objectives, key=lambda one: spread(one.rates))
    function, terms = worst.shares[0].function, amount(sum(share.terms for share in worst.shares))
    if worst.is_even and all(equals(rate, 1.0) for rate in worst.rates):
        return f"The loss is the sum over all {terms} terms of {function}."
    if worst.is_even:
        return f"The loss is {_times(worst.total)}the mean over all {terms} terms of {function}."
    gap = "The distance of its gradient from that of" if worst.gap is None else "Its gradient differs from that of"
    apart = "is not known" if worst.gap is None else f"by {in_words(worst.gap, 'share')}"
    return (
        f"The loss is {_times(worst.total)}a weighted mean of {function}{_over(worst)}{_ratio(worst)}. {gap} the mean "
        f"over all {terms} terms {apart}."
    )


def _times(total: float) -> str:
    """Return what stands before a mean that is multiplied by this, "" where that is 1 or not known."""
    if math.isnan(total) or abs(total - 1) <= NEAR:
        return ""
    known = next((words for factor, words in _PARTS.items() if abs(total / factor - 1) <= NEAR), None)
    return known or f"{_weight(total)} × "


def _over(objective: StepObjective) -> str:
    micro, ranks = max(map(len, objective.ranks)), len(objective.ranks)
    over = [f"{micro} micro-batches" if micro > 1 else "", f"{ranks} ranks" if ranks > 1 else ""]
    return f" over {' of '.join(filter(None, over))}" if any(over) else ""


def _ratio(objective: StepObjective) -> str:
    ratio = spread(objective.rates)
    return "" if ratio in (1.0, math.inf) else f": a term counts up to {ratio:.3g} × as much as another"


def _weight(number: float) -> str:
    return f"{number:,.4g}"
