"""What a check answers."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.outcome import Outcome


@dataclass(frozen=True)
class Finding:
    """One check's answer about one cell. What does not apply is None, never 0 or -1.

    ``error_x_noise`` is the error in multiples of what rounding alone explains, and ``limit_x_noise`` how much of it a
    right trainer may show. ``step`` counts optimizer steps from 0. ``parameters`` has the error of each parameter at
    that step on that rank, in the model's order, where the finding is bad. ``consequence_of`` is the check whose
    finding in the same cell explains this one, None where it stands by itself. ``undeclared`` is what an unsupported
    cell needs and its subject does not declare: ``backend dp``, ``precision 16``, or capabilities by their names.
    """

    check: str
    outcome: Outcome
    message: str
    cause: str | None = None
    family: str | None = None
    error_x_noise: float | None = None
    step: int | None = None
    parameter: str | None = None
    rank: int | None = None
    limit_x_noise: float | None = None
    parameters: tuple[tuple[str, float], ...] = ()
    consequence_of: str | None = None
    undeclared: tuple[str, ...] = ()
