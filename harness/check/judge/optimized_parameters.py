"""Which parameters require a gradient and are in no optimizer: forgotten, or meant, as where only a head is trained."""

from __future__ import annotations

from collections.abc import Iterator

from harness.check.evidence.training import RecordedTraining
from harness.check.judge.noted import information, listed
from harness.core.finding import Finding

CHECK = "update"


def judge_optimized_parameters(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what no optimizer moves, as information: nothing tells a forgotten parameter from one that is meant."""
    optimized = {one.name for rank in training.ranks for step in rank.steps for one in step.parameters}
    for rank in training.ranks:
        names = rank.facts.get("unoptimized") or []
        if names and optimized:
            yield information(
                CHECK,
                f"{len(names)} parameters require a gradient and are in no optimizer, so they never move: "
                f"{listed(names)}; is that meant?",
            )
            return
