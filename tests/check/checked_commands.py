"""Checked commands as `plumbline check` would have made them, without running any."""

from __future__ import annotations

import torch

from plumbline.check.command.checked_command import CheckedCommand
from plumbline.check.command.running import CommandEnd, EndedBy
from plumbline.check.evidence.options import RecordingOptions
from plumbline.check.evidence.training import BackwardPass, Parameter, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.coverage import coverage_of
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.core.finding import Finding, in_reading_order
from plumbline.core.outcome import Outcome

WEIGHT, SCALE = Parameter("net.weight", (6,), "float32"), Parameter("scale", (2,), "float32")

RIGHT = Finding(
    "gradients",
    Outcome.PASSED,
    "every gradient is the mean over 2 ranks of what the backward passes computed",
    error_x_noise=1.02,
    limit_x_noise=2.0,
)
WRONG = Finding(
    "gradients",
    Outcome.FAILED,
    "gradients at step 1 on rank 0 are those of rank 0's own samples: does the forward go through the DDP object?",
    cause="not-synchronised",
    family="sync",
    error_x_noise=3.9e6,
    step=1,
    parameter="net.weight",
    rank=0,
    limit_x_noise=2.0,
    parameters=(("net.weight", 3.9e6), ("scale", float("inf"))),
)
FOLLOWS = Finding("ranks-agree", Outcome.FAILED, "weights differ between ranks", consequence_of="gradients")
NOT_JUDGED = Finding("gradients", Outcome.SKIPPED, "no gradients were judged: gradients were not finite")
BROKEN = Finding("update", Outcome.ERRORED, "the check raised an error, so it has no verdict: ZeroDivisionError")


def updates(numbers=(0, 1)):
    """Return the notes on a right step that moves the parameters with these indices."""
    rows = [[number, 0.1, 0.2, 1.0, 1.0, 1.0, 0.0, 0.2] for number in numbers]
    told = {
        "class": "",
        "of_torch": True,
        "why": "",
        "count": 2,
        "hooks": False,
        "unjudged": {},
        "outside": [],
        "shared": {},
    }
    return {"update": {**told, "parameters": rows}}


def training(*findings, ranks=2, steps=4, optimizers=1, replayed=True, error="", facts=None, moved=(0, 1)):
    """Return a training with a replayed parameter of six entries, and one of two that was not replayed.

    Steps move the parameters with the indices ``moved``.
    """
    local = torch.ones(8, dtype=torch.float64)
    exact = torch.tensor([1.0] * 6 + [torch.nan] * 2, dtype=torch.float64) if replayed else None
    taken = tuple(
        RecordedStep(
            optimizer, number, (WEIGHT, SCALE), local, (BackwardPass(number, local, exact),), facts=updates(moved)
        )
        for number in range(steps)
        for optimizer in range(optimizers)
    )
    noted = {"uncovered": {"scale": "used outside any recorded call"}, **(facts or {})}
    recorded = RecordedTraining(tuple(RecordedRank(rank, ranks, taken, noted, error) for rank in range(ranks)))
    return CheckedTraining(recorded, in_reading_order(findings), coverage_of(recorded, findings))


def checked(*trainings, code=0, by=EndedBy.ITSELF, processes=(), options=None, out_of_memory=0, **more):
    """Return a command that ended with a code and left these trainings."""
    return CheckedCommand(
        ("torchrun", "--nproc-per-node", "2", "train.py"),
        options or RecordingOptions(),
        CommandEnd(code, by, 12.5, out_of_memory),
        list(processes),
        list(trainings),
        0.25,
        **more,
    )
