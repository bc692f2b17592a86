"""What a comparison may fail on, and with which exit code: the gates of a CI job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from harness.report.comparison.changes import Kind, Verdict

if TYPE_CHECKING:
    from harness.report.comparison.comparison import Comparison


@dataclass(frozen=True)
class Gate:
    """``told`` says what it catches."""

    code: int
    told: str
    catches: Callable[[Comparison], bool]


GATES: Final[Mapping[str, Gate]] = {
    "outcome": Gate(
        1,
        "a cell ends worse than before",
        lambda found: any(change.worse and change.kind is not Kind.LOST for change in found.outcomes),
    ),
    "regression": Gate(3, "a figure is worse", lambda found: found.verdicts()[Verdict.WORSE] > 0),
    "incomplete": Gate(
        5,
        "a run is not whole, or cells or figures of A are not in B",
        lambda found: bool(found.incomplete) or found.kinds()[Kind.LOST] > 0,
    ),
    "inconclusive": Gate(
        6,
        "a figure has no verdict, or is not comparable",
        lambda found: any(found.verdicts()[verdict] for verdict in (Verdict.INCONCLUSIVE, Verdict.NOT_COMPARABLE)),
    ),
}
"""The first that catches something gives the exit code. 2 and 4 are those of ``harness.core.exit_codes``."""

USUAL: Final = ("outcome", "regression", "incomplete")


def caught(comparison: Comparison, gates: Collection[str]) -> list[str]:
    """Return which of the ``gates`` catch something, in the order of ``GATES``."""
    return [name for name, gate in GATES.items() if name in gates and gate.catches(comparison)]
