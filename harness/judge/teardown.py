"""Trainings that were complete, and hung when everything had been trained."""

from __future__ import annotations

from dataclasses import replace

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.evidence.trace import Trace

AFTER_TRAINING = ("validation", "metrics")
"""Checks that also ask for what a trainer does when the last step is done: a rank that hung may not have come to it."""


def of_hung(findings: tuple[Finding, ...], trace: Trace) -> tuple[Finding, ...]:
    """Return the findings of a training whose ranks hung after its last step, with a note that says so.

    The evidence of the training is complete, and what it says holds. Only what may have been missing because a rank
    hung is not held against the trainer.
    """
    rank, exit = min(trace.hung.items())
    where = f" waiting in {exit.waits_in}" if exit.waits_in else ""
    where = where or (f" in {exit.stack.splitlines()[0]}" if exit.stack else "")
    version = next((one.torch for one in trace.ranks if one.torch), "")
    note = (
        f"The training was complete. Afterwards rank {rank} hung{where}: {exit.message}"
        f"{f' (torch {version})' if version else ''}. This says nothing about what it computed."
    )
    told = [
        replace(found, outcome=Outcome.TIMED_OUT, message=f"rank {rank} hung after the last step: {found.message}")
        if found.check in AFTER_TRAINING and found.outcome is Outcome.FAILED
        else found
        for found in findings
    ]
    return (Finding("launch", Outcome.PASSED, note, rank=rank), *told)
