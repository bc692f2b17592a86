"""The lines of ``results.jsonl``: a header, one result a finding, one measurement a figure, a footer.

Strict JSON, one object a line.

A field this version does not know is ignored, so that fields may be added within a schema version.
Where JSON has no word for a number: an infinite ``error_x_noise`` is the string ``"inf"``; one that is not a
number is stored as ``"inf"`` too, because no multiple of noise explains it; a missing one is null.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from harness.core.cell import Cell
from harness.core.finding import Finding
from harness.core.outcome import Outcome, worst
from harness.core.software import Software
from harness.core.training_behavior import ORDINARY, TrainingBehavior
from harness.machine.fingerprint import Fingerprint, plumbline_version
from harness.results.fields import AtLeastOne, Count, Figure, Plain, Text, UtcTime, XNoise

SCHEMA_VERSION = 1
_LONGEST_MESSAGE = 10_000

KNOWN: Final = "known"
"""How a cell ends whose bad findings were all expected. Not one of ``Outcome``: its checks did fail."""

UNEXPECTED_PASS: Final = "unexpected pass"
"""How a cell ends that should have failed, and in which nothing did but what was expected to."""

PERFORMANCE: Final = "performance"
"""The check of a cell that was measured: it says how the measuring ended, and nothing of right and wrong."""

Coordinates = tuple[str, str, str, int, int, str, str]
"""A cell as a key: subject, workload, backend, num_nodes, gpus, precision, accelerator."""


class Record(BaseModel):
    """What every line and every part of one has in common."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class CellRecord(Record):
    """What speaks of a cell: by its coordinates, and by its id, which is for reading and for file names."""

    cell: Text
    subject: Text
    workload: Text
    backend: Text
    num_nodes: AtLeastOne
    gpus: AtLeastOne
    precision: Text
    accelerator: Text

    @property
    def coordinates(self) -> Coordinates:
        """What tells this cell from every other one in the run."""
        return (
            self.subject,
            self.workload,
            self.backend,
            self.num_nodes,
            self.gpus,
            self.precision,
            self.accelerator,
        )


class PlannedCell(CellRecord):
    """A cell that the run means to answer for; ``measured``: for its speed, and it is not examined.

    ``conduct`` is what its subject declared of its way of training, as far as that differs from the default.
    """

    measured: bool = False
    conduct: dict[Text, Text | AtLeastOne] = {}

    @classmethod
    def of(cls, cell: Cell, *, measured: bool = False, behavior: TrainingBehavior = ORDINARY) -> PlannedCell:
        """Write a cell down."""
        return cls(**_fields_of(cell), measured=measured, conduct=behavior.declared)


class Header(Record):
    """The first line: which run this is, and every cell it means to answer for.

    ``simulated``: devices stand in for what was asked, and no figure of this run is about speed. ``subjects`` says of
    each what it ran on.
    """

    type: Literal["header"] = "header"
    schema_version: int = SCHEMA_VERSION
    # The folder's name, so nothing that leads out of the report directory.
    run_id: Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]{0,99}$")]
    started: UtcTime
    plumbline: Text
    command: tuple[Text, ...] = ()
    options: Plain = {}
    fingerprint: Fingerprint = Fingerprint()
    simulated: bool
    subjects: dict[Text, Software] = {}
    planned: tuple[PlannedCell, ...] = ()

    @classmethod
    def of(
        cls,
        cells: Iterable[Cell],
        *,
        measured: Iterable[Cell] = (),
        command: Sequence[str],
        options: Mapping[str, JsonValue],
        fingerprint: Fingerprint,
        simulated: bool,
        subjects: Mapping[str, Software] | None = None,
        behaviors: Mapping[Cell, TrainingBehavior] | None = None,
        started: datetime | None = None,
    ) -> Header:
        """Begin a run of ``cells``, and of others that are ``measured``, now, or at ``started`` (an aware datetime).

        ``behaviors`` has what the subjects declared of their way of training; a cell that is not there is ordinary.
        The program in ``command[0]`` loses its folder, which would name the user's home in a public report.
        """
        started = started or datetime.now(timezone.utc)
        return cls(
            run_id=new_run_id(started),
            started=started,
            plumbline=plumbline_version(),
            command=(Path(command[0]).name, *command[1:]) if command else (),
            options=dict(options),
            fingerprint=fingerprint,
            simulated=simulated,
            subjects=dict(subjects or {}),
            planned=(
                *(PlannedCell.of(cell, behavior=(behaviors or {}).get(cell, ORDINARY)) for cell in cells),
                *(PlannedCell.of(cell, measured=True) for cell in measured),
            ),
        )


class Expected(Record):
    """What somebody wrote down beforehand about a finding: how this trainer ends here, and why.

    ``outcome`` is how the check was expected to end, ``entry`` says where that is written, ``reproduction`` names a
    program that shows it without Plumbline, ``measured`` what it was seen with. ``library``, with its version, is named
    where it is that of which this is known, and the subject only uses it.
    """

    outcome: Outcome
    reason: Text
    link: Text | None = None
    reproduction: Text | None = None
    measured: Text | None = None
    entry: Text
    library: Text | None = None


class Result(CellRecord):
    """One finding about one cell.

    ``seconds`` is the wall time of the cell's launch, the same on each of its findings. ``step`` counts
    optimizer steps from 0. ``error_x_noise`` is the error in multiples of what rounding alone explains.
    ``limit_x_noise`` is how much a right trainer may show; ``parameters`` has the error of each parameter at that step
    on that rank, in the model's order. ``reproduce`` is a command that runs just this cell. ``expected`` is what was
    known of it beforehand. ``findings`` says how many of them its cell has. ``consequence_of`` is the check whose
    finding in the same cell explains this one; runs recorded by older versions have None. ``undeclared`` is what an
    unsupported cell needs and its subject does not declare: ``backend dp``, ``precision 16``, or capabilities by their
    names. What does not apply is None.
    """

    type: Literal["result"] = "result"
    check: Text
    outcome: Outcome
    cause: Text | None = None
    family: Text | None = None
    error_x_noise: XNoise | None = None
    step: Count | None = None
    parameter: Text | None = None
    rank: Count | None = None
    limit_x_noise: XNoise | None = None
    parameters: dict[Text, XNoise] = {}
    message: Text = ""
    reproduce: Text = ""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    expected: Expected | None = None
    findings: AtLeastOne | None = None
    consequence_of: Text | None = None
    undeclared: tuple[Text, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether it is bad, and just as bad as was expected."""
        return self.expected is not None and self.outcome.is_bad and self.outcome is self.expected.outcome

    @property
    def is_unexpectedly_good(self) -> bool:
        """Whether it was expected to be bad, and is not."""
        return self.expected is not None and not self.outcome.is_bad

    @classmethod
    def of(
        cls,
        cell: Cell,
        finding: Finding,
        reproduce: str,
        seconds: float | None,
        expected: Expected | None = None,
        findings: int | None = None,
    ) -> Result:
        """Write a finding down. A very long message keeps its beginning and its end."""
        return cls(
            **_fields_of(cell),
            check=finding.check,
            outcome=finding.outcome,
            cause=finding.cause,
            family=finding.family,
            error_x_noise=finding.error_x_noise,
            step=finding.step,
            parameter=finding.parameter,
            rank=finding.rank,
            limit_x_noise=finding.limit_x_noise,
            parameters=dict(finding.parameters),
            message=_without_its_middle(finding.message),
            reproduce=reproduce,
            seconds=seconds,
            expected=expected,
            findings=findings,
            consequence_of=finding.consequence_of,
            undeclared=finding.undeclared,
        )


class Measurement(CellRecord):
    """One figure of one cell, from launches that were timed and not recorded.

    ``value`` is the figure in ``unit``; ``better`` says which way is better, None where neither is. ``samples`` holds
    what each launch measured, in turn; ``low`` and ``high`` bound the figure with 95 % confidence. A figure whose
    samples spread too widely to say anything has no ``value``: ``refusal`` says so. ``rank`` is the rank it speaks of,
    None where it is of all. ``quantiles`` are those of single steps, evenly spaced from the least to the most.
    ``workload_key`` changes whenever the workload's definition does.
    """

    type: Literal["measurement"] = "measurement"
    metric: Text
    unit: Text
    better: Literal["higher", "lower"] | None = None
    value: Figure | None = None
    low: Figure | None = None
    high: Figure | None = None
    samples: tuple[Figure, ...] = ()
    quantiles: tuple[Figure, ...] = ()
    refusal: Text | None = None
    rank: Count | None = None
    workload_key: Text = ""
    reproduce: Text = ""

    @classmethod
    def of(
        cls, cell: Cell, metric: str, unit: str, better: Literal["higher", "lower"] | None, **others: Any
    ) -> Measurement:
        """Write a figure of a cell down; ``others`` are fields by their names."""
        return cls(**_fields_of(cell), metric=metric, unit=unit, better=better, **others)


class Footer(Record):
    """The last line: the run came to its end.

    Each cell is counted once: with those whose bad findings were all expected, with those that are better than
    expected, or in ``cells``, by its worst outcome.
    """

    type: Literal["footer"] = "footer"
    finished: UtcTime
    cells: dict[Outcome, Count]
    known: Count = 0
    unexpected_passes: Count = 0
    exit_status: int

    @classmethod
    def of(cls, results: Iterable[Result], exit_status: int, finished: datetime | None = None) -> Footer:
        """End a run that left ``results``, now or at ``finished`` (an aware datetime)."""
        cells: dict[Coordinates, list[Result]] = {}
        for result in results:
            cells.setdefault(result.coordinates, []).append(result)
        ends = list(map(ending, cells.values()))
        return cls(
            finished=finished or datetime.now(timezone.utc),
            cells={outcome: ends.count(outcome) for outcome in Outcome if outcome in ends},
            known=ends.count(KNOWN),
            unexpected_passes=ends.count(UNEXPECTED_PASS),
            exit_status=exit_status,
        )


def ending(results: Sequence[Result]) -> Outcome | Literal["known", "unexpected pass"]:
    """Return how the cell of these findings ended: as badly as the worst that nobody expected.

    Where nothing is bad but what was expected to be, it is ``known``; where something else than that is better than
    expected, an ``unexpected pass``.

    Raises:
        ValueError: there is no finding.
    """
    unknown = [result.outcome for result in results if not result.is_known]
    if unknown and worst(unknown).is_bad:
        return worst(unknown)
    if any(result.is_unexpectedly_good for result in results):
        return UNEXPECTED_PASS
    return KNOWN if len(unknown) < len(results) else worst(unknown)


def new_run_id(started: datetime) -> str:
    """Return a name that sorts by time and that two runs of the same second do not share."""
    return f"{started.astimezone(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def _fields_of(cell: Cell) -> dict[str, Any]:
    return {
        "cell": cell.id,
        "subject": cell.subject,
        "workload": cell.workload,
        "backend": cell.backend,
        "num_nodes": cell.topology.num_nodes,
        "gpus": cell.topology.gpus,
        "precision": cell.precision,
        "accelerator": cell.accelerator,
    }


def _without_its_middle(message: str) -> str:
    if len(message) <= _LONGEST_MESSAGE:
        return message
    half = _LONGEST_MESSAGE // 2
    return f"{message[:half]} … {message[-half:]}"
