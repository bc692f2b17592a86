"""The first and the last line of ``results.jsonl``: which run this is, and how it ended."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.software import Software
from plumbline.core.training_behavior import ORDINARY, TrainingBehavior
from plumbline.machine.fingerprint import Fingerprint
from plumbline.machine.software import plumbline_version
from plumbline.results.fields import Count, Plain, Text, UtcTime
from plumbline.results.records import KNOWN, UNEXPECTED_PASS, PlannedCell, Record, Result, SourceLine, by_cell, ending

SCHEMA_VERSION = 1


class WorkloadSource(Record):
    """Where a workload of the user's own was: what was typed to find it, and the hash of its source."""

    locator: Text
    sha256: Text


class SubjectCode(Record):
    """A trainer's own code: the hash of its source, and the commit of the repository that its file is part of.

    The source is the file and what it imports from its folder. The commit ends in ``-dirty`` where its code had
    changes; None: the file is in no repository, or ships with plumbline.
    """

    sha256: Text | None = None
    commit: Text | None = None


class Header(Record):
    """The first line: which run this is, and every cell of its plan.

    ``simulated``: devices were simulated, so figures of speed and memory are those of the CPU. ``subjects`` has the
    software that each ran on, ``sources`` where the ``train`` of each begins, ``code`` which version of it that is,
    ``workloads`` where those of the user's own were, by name.
    """

    type: Literal["header"] = "header"
    schema_version: int = SCHEMA_VERSION
    # It names the folder, so it must not lead out of the report directory.
    run_id: Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]{0,99}$")]
    started: UtcTime
    plumbline: Text
    command: tuple[Text, ...] = ()
    options: Plain = Field(default_factory=dict)
    fingerprint: Fingerprint = Fingerprint()
    simulated: bool
    subjects: dict[Text, Software] = Field(default_factory=dict)
    sources: dict[Text, SourceLine] = Field(default_factory=dict)
    code: dict[Text, SubjectCode] = Field(default_factory=dict)
    workloads: dict[Text, WorkloadSource] = Field(default_factory=dict)
    planned: tuple[PlannedCell, ...] = ()

    @classmethod
    def of(
        cls,
        cells: Iterable[Cell],
        *,
        measured: Iterable[Cell] = (),
        command: Sequence[str],
        behaviors: Mapping[Cell, TrainingBehavior] | None = None,
        started: datetime | None = None,
        **fields: Any,
    ) -> Header:
        """Return the header of a run that examines ``cells`` and measures ``measured``, begun now or at ``started``.

        ``behaviors`` has what subjects declare about how they train; cells without an entry are ordinary.
        ``command[0]`` loses its folder, which could reveal the user's home in a public report.
        """
        started = started or datetime.now(timezone.utc)
        return cls(
            run_id=new_run_id(started),
            started=started,
            plumbline=plumbline_version(),
            command=(Path(command[0]).name, *command[1:]) if command else (),
            planned=(
                *(PlannedCell.of(cell, behavior=(behaviors or {}).get(cell, ORDINARY)) for cell in cells),
                *(PlannedCell.of(cell, measured=True) for cell in measured),
            ),
            **fields,
        )


class Footer(Record):
    """The last line: the run is complete.

    Each cell is counted once: as ``known`` if its bad findings were all expected, as one of ``unexpected_passes`` if it
    is better than expected, else in ``cells`` by its worst outcome.
    """

    type: Literal["footer"] = "footer"
    finished: UtcTime
    cells: dict[Outcome, Count]
    known: Count = 0
    unexpected_passes: Count = 0
    exit_status: int

    @classmethod
    def of(cls, results: Iterable[Result], exit_status: int, finished: datetime | None = None) -> Footer:
        """Return the footer of a run with ``results`` that ends now, or at ``finished`` (an aware datetime)."""
        ends = list(map(ending, by_cell(results).values()))
        return cls(
            finished=finished or datetime.now(timezone.utc),
            cells={outcome: ends.count(outcome) for outcome in Outcome if outcome in ends},
            known=ends.count(KNOWN),
            unexpected_passes=ends.count(UNEXPECTED_PASS),
            exit_status=exit_status,
        )


def new_run_id(started: datetime) -> str:
    """Return a name that sorts by time and differs between runs of the same second."""
    return f"{started.astimezone(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
