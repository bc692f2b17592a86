"""What recording and replaying a training will cost, from one step that was recorded without a replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbline.check.evidence.training import RecordedTraining
from plumbline.core.numbers import counted
from plumbline.report.text import in_words

PLAIN_STEPS = 2
"""Steps that a dry run takes before the recorded one. The second one is timed."""

_GRADIENTS_AND_WEIGHTS = 2 * 8
"""Bytes for each entry of a parameter: a replay holds its weight and its gradient in float64."""


@dataclass(frozen=True)
class CostEstimate:
    """The largest costs of any rank, for one step; times are in seconds.

    ``replay_s`` is the time of a plain step, multiplied by the slowdown of a matrix product in float64. ``extra_bytes``
    is what a replay holds in addition to the training: weights and gradients in float64, recorded inputs, and what the
    largest forward saves for its backward pass in float64. ``evidence_bytes`` is the size of one step's file on one
    rank.
    """

    ranks: int
    plain_s: float
    recorded_s: float
    replay_s: float
    parameter_bytes: int
    extra_bytes: int
    evidence_bytes: int

    def checked_s(self, steps: int) -> float:
        """Return how long ``steps`` recorded steps will take if the gradients of each are recomputed."""
        return steps * (max(self.recorded_s, self.plain_s) + self.replay_s)

    def unchecked_s(self, steps: int) -> float:
        """Return how long ``steps`` steps take without a check."""
        return steps * self.plain_s

    def all_evidence_bytes(self, steps: int) -> int:
        """Return how large the files of all ranks will be."""
        return self.evidence_bytes * steps * self.ranks


def estimate(training: RecordedTraining, folder: Path) -> CostEstimate | None:
    """Return the costs measured in a dry run with evidence in ``folder``; None if a rank measured nothing."""
    facts: list[dict[str, Any]] = [rank.facts["cost"] for rank in training.ranks if rank.facts.get("cost")]
    if not facts or len(facts) < len(training.ranks):
        return None
    return CostEstimate(
        training.world_size,
        max(one["plain_s"] for one in facts),
        max(one["recorded_s"] for one in facts),
        max(one["plain_s"] * one["float64_ratio"] for one in facts),
        max(one["parameter_bytes"] for one in facts),
        max(_GRADIENTS_AND_WEIGHTS * one["parameters"] + one["input_bytes"] + one["saved_bytes"] for one in facts),
        max(file.stat().st_size for file in folder.glob("rank-*/step-*")),
    )


def estimate_lines(one: CostEstimate, steps: int) -> Iterator[str]:
    """Yield what ``steps`` steps will cost, in sentences."""
    yield (
        f"{counted(steps, 'recorded step')} will take at most about {in_words(one.checked_s(steps), 's')}, instead of "
        f"{in_words(one.unchecked_s(steps), 's')} without a check"
    )
    yield (
        f"time: an unrecorded step took {in_words(one.plain_s, 's')}, a recorded one {in_words(one.recorded_s, 's')}; "
        f"recomputing its gradients in float64 takes about {in_words(one.replay_s, 's')}"
    )
    yield (
        f"memory: about {in_words(one.extra_bytes, 'bytes')} more on each rank, in addition to "
        f"{in_words(one.parameter_bytes, 'bytes')} of parameters"
    )
    yield (
        f"evidence: {in_words(one.evidence_bytes, 'bytes')} per rank and step, "
        f"{in_words(one.all_evidence_bytes(steps), 'bytes')} in the temporary folder"
    )
