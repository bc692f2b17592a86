"""What gradients begin with: functions by which a loss communicates, and what stages of a pipeline give each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.model_parts import OBSERVER
from plumbline.check.judge.noted import headline_note
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.findings import failed_with_hint
from plumbline.report.text import listed

_WRONG = {
    "own": "leaves out the gradients of the other ranks",
    "multiple": "multiplies the derivative of its forward by the number of ranks",
}
"""What is wrong about a backward. Other differences may be a derivative that the script defines on purpose."""


def with_stages(training: RecordedTraining, finding: Finding) -> Finding:
    """Return the finding about gradients that passed, or that a stage received others than the next one computed."""
    noted = [(step.number, step.facts.get(OBSERVER) or {}) for step in training.ranks[0].steps]
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
    """Yield the finding about gradients that passed, or what is wrong with a function of the loss in its place.

    Gradients that are the mean of what backward passes computed are right only if those begin with the right ones.
    """
    first = training.ranks[0]
    found = [
        (step.number, one) for step in first.steps for one in (step.facts.get(OBSERVER) or {}).get("functions", ())
    ]
    if finding.outcome is not Outcome.PASSED or not found:
        yield finding
        return
    wrong = next(((number, one) for number, one in found if one["is"] in _WRONG), None)
    if wrong is not None:
        number, one = wrong
        failed = failed_with_hint(
            finding.check,
            f"the loss communicates through {one['function']}, whose backward {_WRONG[one['is']]}",
            "correct the backward: an all-gather needs a reduce-scatter, an all-reduce needs an all-reduce",
            cause="exchanged-otherwise",
            family="sync",
            step=number,
        )
        yield replace(failed, error_x_noise=one["error"])
        return
    parts = dict.fromkeys(one["function"] for _, one in found if one["is"] == "part")
    right = [
        name for name in dict.fromkeys(one["function"] for _, one in found if one["is"] == "right") if name not in parts
    ]
    also = f"; the loss communicates through {listed(right)}, whose backward is the derivative of the forward"
    yield replace(finding, message=finding.message + also) if right else finding
    if parts:
        yield headline_note(
            finding.check,
            f"The loss communicates through {listed(parts)}, whose backward gives 1/{training.world_size} of the "
            "derivative of its forward. Sum the gradients over all ranks in its backward, or multiply the loss by the "
            "number of ranks, unless this division is intended.",
        )
