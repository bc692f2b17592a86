"""A cause that was found without a prediction: from counts, ids, rates and names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.core.finding import UNEXPLAINED, Finding


@dataclass(frozen=True)
class Cause:
    """A named mistake, its family, and where to look; ``step`` and ``rank`` where it shows first."""

    name: str
    family: str
    look: str
    step: int | None = None
    rank: int | None = None

    def explain(self, finding: Finding) -> Finding:
        """Return the finding with this cause."""
        return replace(
            finding,
            cause=self.name,
            family=self.family,
            message=f"{finding.message}: {self.look}",
            step=finding.step if self.step is None else self.step,
            rank=finding.rank if self.rank is None else self.rank,
        )


def explained(finding: Finding, *causes: Cause | None) -> Finding:
    """Return the finding with the first cause that there is; without one it says ``unexplained``."""
    for cause in causes:
        if cause is not None:
            return cause.explain(finding)
    return replace(finding, cause=UNEXPLAINED)
