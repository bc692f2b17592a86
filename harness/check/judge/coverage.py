"""What of a training was not covered: parameters whose gradients could not be followed, or not be computed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.check.evidence import RecordedTraining
from harness.check.judge.gradients import received_gradients
from harness.core.finding import Finding
from harness.core.outcome import Outcome

CHECK = "coverage"


@dataclass(frozen=True)
class Coverage:
    """Shares of the parameters' entries, from 0 to 1.

    ``followed``: their local gradients are known, so what the optimizer received is judged. ``replayed``: these were
    computed again in float64. ``reasons`` says of the others, by name, why they were not.
    """

    followed: float
    replayed: float
    reasons: dict[str, str]


def coverage(training: RecordedTraining) -> Coverage | None:
    """Return the coverage of a training; None if nothing was judged."""
    entries: dict[str, int] = {}
    unfollowed: set[str] = set()
    unreplayed: set[str] = set()
    for case in received_gradients(training):
        sizes = {one.name: one.entries for one in case.parameters}
        entries |= sizes
        unfollowed |= {name for name, known in zip(sizes, case.covered.tolist(), strict=True) if not known}
        exact = case.exact(case.evenly())
        for name, part in zip(sizes, [None] * len(sizes) if exact is None else case.parts(exact), strict=True):
            if part is None or bool(part.isnan().any()):
                unreplayed.add(name)
    total = sum(entries.values())
    if not total:
        return None
    reasons = {name: why for rank in training.ranks for name, why in rank.facts.get("uncovered", {}).items()}
    return Coverage(
        1 - sum(entries[name] for name in unfollowed) / total,
        1 - sum(entries[name] for name in unreplayed | unfollowed) / total,
        {name: reasons.get(name, "its gradient reached it in no recorded call") for name in sorted(unreplayed)},
    )


def judge_coverage(training: RecordedTraining) -> Iterator[Finding]:
    """Yield one finding that says which share of the parameters was judged, and why the rest was not."""
    found = coverage(training)
    if found is None:
        return
    reasons: dict[str, list[str]] = {}
    for name, why in found.reasons.items():
        reasons.setdefault(why, []).append(name)
    rest = "".join(
        f"; {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {why}" for why, names in reasons.items()
    )
    outcome = Outcome.PASSED if found.followed > 0 else Outcome.SKIPPED
    yield Finding(
        CHECK,
        outcome,
        f"gradients of {found.followed:.1%} of the parameters were judged, {found.replayed:.1%} were computed again in "
        f"float64{rest}",
    )
