"""The occasions of a mistake that does not happen at every step: what the wrong steps have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plumbline.judge.causes.oracle_gradient_case import OracleGradientCase
from plumbline.judge.causes.stage_pattern import ranks_in_words


def _evaluated(case: OracleGradientCase) -> bool:
    return any(step == case.index and micro_batches for step, micro_batches in case.counterfactuals.evaluations())


def _after_an_evaluation(case: OracleGradientCase) -> bool:
    begin = case.index - _place_in_epoch(case)
    return any((begin, 0) < place < (case.index + 1, 0) for place in case.counterfactuals.evaluations())


def _place_in_epoch(case: OracleGradientCase) -> int:
    return case.index % case.counterfactuals.steps_per_epoch


OCCASIONS: dict[str, Callable[[OracleGradientCase], bool]] = {
    "in a step that leaves parameters unused": lambda case: bool(case.unused),
    "in a window in which the model is evaluated": _evaluated,
    "after an evaluation, until the epoch ends": _after_an_evaluation,
    "after the first evaluation": lambda case: any(
        place < (case.index + 1, 0) for place in case.counterfactuals.evaluations()
    ),
    "in a short window": lambda case: case.micro_batches < case.accumulate,
    "in a full window": lambda case: case.micro_batches == case.accumulate > 1,
    "in the first step": lambda case: case.index == 0,
    "in every step but the first": lambda case: case.index > 0,
    "in the first step of an epoch": lambda case: _place_in_epoch(case) == 0,
    "in every step of an epoch but its first": lambda case: _place_in_epoch(case) > 0,
    "in the last step of an epoch": lambda case: _place_in_epoch(case) == case.counterfactuals.steps_per_epoch - 1,
    "in the first epoch": lambda case: case.index < case.counterfactuals.steps_per_epoch,
    "from the second epoch on": lambda case: case.index >= case.counterfactuals.steps_per_epoch,
    "in every second step, starting with the first": lambda case: case.index % 2 == 0,
    "in every second step, starting with the second": lambda case: case.index % 2 == 1,
    "after a skipped step": lambda case: case.counterfactuals.skipped_before(case.index),
}
"""Properties of a step that do not depend on its gradient, in words, the specific before the general."""


def occasion(
    wrong: Sequence[OracleGradientCase], refuting: Sequence[OracleGradientCase], every: Sequence[OracleGradientCase]
) -> str | None:
    """Return in words what holds for every wrong case, and for none that refutes the hypothesis."""
    for words, holds in OCCASIONS.items():
        if all(map(holds, wrong)) and not any(map(holds, refuting)):
            return words
    ranks = {case.rank for case in wrong}
    # A rank has no case at a step where its gradient equals an earlier rank's.
    present = {(case.index, case.rank) for case in every}
    always = all((index, rank) in present for index in {case.index for case in every} for rank in ranks)
    on_ranks = f"on {ranks_in_words(sorted(ranks))} only"
    if always and not ranks & {case.rank for case in refuting}:
        return on_ranks
    steps = {case.index for case in wrong}
    first = min(steps)
    later = [case for case in refuting if case.index >= first]
    if len(steps) > 1 and any(case.rank in ranks for case in later):
        return None
    when = f"at step {first} only" if len(steps) == 1 else f"from step {first} on"
    return f"{when}, {on_ranks}" if any(case.index in steps for case in later) else when
