"""Judges where gradients start: functions through which a loss communicates, and exchanges of pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from plumbline.check.evidence.training import Facts, RecordedTraining
from plumbline.check.judge.noted import headline_note, not_judged
from plumbline.check.judge.rank_weights import JOINT
from plumbline.check.judge.step_objective import is_loss_divided
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.findings import failed_with_hint
from plumbline.report.text import listed

_WRONG = {
    "own": "leaves out the gradients of the other ranks",
    "multiple": "multiplies the derivative of its forward by the number of ranks",
    "linear": "is not the derivative of its linear forward",
}
"""What is wrong about a backward. Other differences may be a derivative that the script defines on purpose."""


def with_stages(training: RecordedTraining, finding: Finding) -> Finding:
    """Return the finding, or a failure if a stage received other gradients than the next stage computed."""
    noted = [(step.number, step.noted(JOINT)) for step in training.ranks[0].steps]
    changed = [(number, one) for number, facts in noted for one in facts.get("changed", ())]
    if finding.outcome is not Outcome.PASSED or not changed:
        return finding
    number, one = changed[0]
    failed = failed_with_hint(
        finding.check,
        f"rank {one['receiver']} received gradients of its outputs that differ from those that rank {one['sender']} "
        f"computed ({one['factor']:.4g} × as large along a random direction)",
        "check that each stage sends the gradient of each input once, to the stage that sent the input",
        cause="exchanged-otherwise",
        family="sync",
        step=number,
        rank=one["receiver"],
    )
    return replace(failed, error_x_noise=one["error"])


def with_losses(training: RecordedTraining, finding: Finding) -> Iterator[Finding]:
    """Yield the finding, or the failure of a function through which the loss communicates.

    The mean of what backward passes computed is right only if these passes begin with the right gradients.
    """
    relations = relations_of_losses(training)
    if finding.outcome is not Outcome.PASSED or not relations:
        yield finding
        return
    if (instead := _without_right_backwards(training, relations, finding)) is not None:
        yield instead
        return
    parts = [name for name, relation in relations.items() if relation == "part"]
    right = [name for name, relation in relations.items() if relation == "right"]
    also = f"; the loss communicates through {listed(right)}, whose backward is the derivative of the forward"
    yield replace(finding, message=finding.message + also) if right else finding
    if parts:
        size = next(one["ranks"] for _, one in _functions(training) if one["function"] in parts)
        yield headline_note(
            finding.check,
            f"The loss communicates through {listed(parts)}, whose backward gives 1/{size} of the derivative of its "
            f"forward. Sum the gradients over these {size} ranks in its backward, or multiply the loss by {size}, "
            "unless this division is intended.",
        )


def with_shared_loss(training: RecordedTraining, finding: Finding, *, is_sum: bool) -> Finding:
    """Return the finding of the joint forward, or what is wrong or unknown if ranks compute the same loss together.

    ``is_sum``: all ranks compute one loss, and optimizers received the sum of what their backward passes computed.
    """
    relations = relations_of_losses(training)
    if finding.outcome is not Outcome.PASSED or not relations:
        return finding
    if (instead := _without_right_backwards(training, relations, finding)) is not None:
        return instead
    right = [name for name, relation in relations.items() if relation == "right"]
    if not (right and is_sum) or is_loss_divided(training.ranks):
        return finding
    world = training.world_size
    return not_judged(
        finding.check,
        f"all {world} ranks compute the same loss through {listed(right)}, whose backward is the derivative of the "
        f"sum of their losses, so gradients are {world} × those of one loss. That is right if the loss is divided by "
        f"{world}, which could not be determined",
    )


def relations_of_losses(training: RecordedTraining) -> Mapping[str, str]:
    """Return how the backward of each function through which a loss communicates relates to its derivative."""
    relations: dict[str, str] = {}
    for _, one in _functions(training):
        if relations.get(one["function"]) not in {"part", ""}:
            relations[one["function"]] = one["is"]
    return relations


def _functions(training: RecordedTraining) -> list[tuple[int, Facts]]:
    steps = training.ranks[0].steps
    return [(step.number, one) for step in steps for one in step.noted(JOINT).get("functions", ())]


def _without_right_backwards(
    training: RecordedTraining, relations: Mapping[str, str], finding: Finding
) -> Finding | None:
    """Return what is said in place of ``finding`` if a backward is wrong, or is not the derivative of its forward."""
    if (failed := _with_wrong_backward(training, finding)) is not None:
        return failed
    # The script may define this derivative on purpose, or by mistake.
    if others := [name for name, relation in relations.items() if not relation]:
        return not_judged(
            finding.check,
            f"the backward of {listed(others)}, through which the loss communicates, is not the derivative of its "
            "forward. If this is intended, gradients that pass through it cannot be judged; otherwise correct it",
        )
    return None


def _with_wrong_backward(training: RecordedTraining, finding: Finding) -> Finding | None:
    for number, one in _functions(training):
        if one["is"] in _WRONG:
            failed = failed_with_hint(
                finding.check,
                f"the loss communicates through {one['function']}, whose backward {_WRONG[one['is']]}",
                "correct the backward: an all-gather needs a reduce-scatter, an all-reduce needs an all-reduce, and an "
                "exchange with other ranks needs the exchange in the opposite direction",
                cause="exchanged-otherwise",
                family="sync",
                step=number,
            )
            return replace(failed, error_x_noise=one["error"])
    return None
