"""Results of faults over several invocations, in a file with one JSON object per injection or soak."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fault_lane.fault import Tally
from fault_lane.left import Leftovers
from fault_lane.soak import Reading, Soak


@dataclass
class Kept:
    """Tallies by row and name, and the last soak. With a ``file``, starts with its results and appends to it."""

    file: Path | None
    tallies: dict[tuple[int, str], Tally] = field(default_factory=dict)
    soak: Soak | None = None

    def __post_init__(self) -> None:
        for line in self.file.read_text().splitlines() if self.file and self.file.exists() else ():
            self._take(_read(json.loads(line)))

    def add(self, seen: Tally | Soak) -> None:
        """Add new results."""
        self._take(seen)
        if self.file:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(seen)) + "\n")

    def ordered(self, names: Iterable[tuple[int, str]]) -> list[Tally]:
        """Return the tallies in the order of ``names``."""
        return [self.tallies[name] for name in names if name in self.tallies]

    def _take(self, seen: Tally | Soak) -> None:
        if isinstance(seen, Soak):
            self.soak = seen
        else:
            place = seen.row, seen.name
            self.tallies[place] = self.tallies[place] + seen if place in self.tallies else seen


def _read(values: dict[str, Any]) -> Tally | Soak:
    if "readings" in values:
        readings = tuple(Reading(**reading) for reading in values["readings"])
        return Soak(**{**values, "readings": readings, "alarms": tuple(values["alarms"])})
    return Tally(**{**values, "left": Leftovers(**values["left"]), "wrong": tuple(values["wrong"])})
