"""What ``plumbline check --json`` wrote about one run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BAD = ("failed", "errored", "crashed", "timed_out")


@dataclass(frozen=True)
class Verdict:
    """The findings of a check, the bad ones first as the check ordered them.

    Attributes:
        findings: as they stand in the file.
        coverage: the share of the trainable parameters that was replayed; None where the file does not say.
    """

    findings: tuple[dict[str, Any], ...]
    coverage: float | None

    @property
    def bad(self) -> tuple[dict[str, Any], ...]:
        """What is held against the script."""
        return tuple(one for one in self.findings if one["outcome"] in BAD)

    @property
    def first_cause(self) -> str | None:
        """The cause in the first line: None where nothing is wrong."""
        return str(self.bad[0].get("cause") or "unexplained") if self.bad else None

    @property
    def noise(self) -> float | None:
        """The largest error in units of rounding noise."""
        found = [one["error_x_noise"] for one in self.findings if one.get("error_x_noise") is not None]
        return max(found, default=None)


def read_verdict(file: Path) -> Verdict:
    """Read the file of ``--json``."""
    whole = json.loads(file.read_text(encoding="utf-8"))
    return Verdict(tuple(whole["findings"]), whole.get("coverage"))
