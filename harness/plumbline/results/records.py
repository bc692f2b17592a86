"""The lines of ``results.jsonl`` about one cell: a result for each finding, a measurement for each figure.

Strict JSON, one object per line; the first and the last line are in ``header_footer``.

Unknown fields are ignored, so that fields can be added within a schema version. JSON has no infinity: an infinite
``error_x_noise`` is the string ``"inf"``; NaN is stored as ``"inf"`` too, because no multiple of noise explains it; a
missing one is null.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome, worst
from plumbline.core.training_behavior import ORDINARY, TrainingBehavior
from plumbline.results.fields import AtLeastOne, Count, Figure, Text, XNoise

_LONGEST_MESSAGE = 10_000
KNOWN: Final = "known"
"""The end of a cell whose bad findings were all expected. It is not in ``Outcome``, because its checks did fail."""

UNEXPECTED_PASS: Final = "unexpected pass"
"""The end of a cell in which an expected failure did not occur, and nothing failed unexpectedly."""

PERFORMANCE: Final = "performance"
"""The check of a measured cell. Its outcome is that of the measurement, and says nothing about correctness."""


class Coordinates(NamedTuple):
    """A cell as a key; ``gpus`` is the number per node, ``mesh`` is the mesh that the user chose for them (``4x2``)."""

    subject: str
    workload: str
    backend: str
    num_nodes: int
    gpus: int
    precision: str
    accelerator: str
    mesh: str = ""

    @property
    def topology(self) -> tuple[int, int]:
        return self.num_nodes, self.gpus

    @property
    def devices(self) -> int:
        return self.num_nodes * self.gpus


class Record(BaseModel):
    """The base of every line and of its parts."""

    model_config = ConfigDict(frozen=True, extra="ignore", from_attributes=True)


class CellRecord(Record):
    """A record about a cell, with its coordinates, and its id for people and file names."""

    cell: Text
    subject: Text
    workload: Text
    backend: Text
    num_nodes: AtLeastOne
    gpus: AtLeastOne
    precision: Text
    accelerator: Text
    mesh: Text = ""

    @property
    def topology(self) -> str:
        return f"{self.num_nodes}x{self.gpus}@{self.mesh}" if self.mesh else f"{self.num_nodes}x{self.gpus}"

    @property
    def coordinates(self) -> Coordinates:
        return Coordinates(
            self.subject, self.workload, self.backend, self.num_nodes, self.gpus, self.precision, self.accelerator,
            self.mesh,
        )  # fmt: skip


class PlannedCell(CellRecord):
    """A cell of the run's plan; ``measured``: its speed is measured, and it is not examined.

    ``conduct`` has the subject's declarations of its way of training that differ from the default.
    """

    measured: bool = False
    conduct: dict[Text, Text | AtLeastOne] = {}

    @classmethod
    def of(cls, cell: Cell, *, measured: bool = False, behavior: TrainingBehavior = ORDINARY) -> PlannedCell:
        return cls(**_fields_of(cell), measured=measured, conduct=behavior.declared)


class SourceLine(Record):
    """A line of a file, which is relative to the folder that the run was started in."""

    file: Text
    line: AtLeastOne

    @classmethod
    def of(cls, file: str | Path, line: int) -> SourceLine | None:
        """Return the place; None if the file belongs to an installed package, or is not below the current folder."""
        below = Path(os.path.relpath(file))
        if below.parts[0] == os.pardir or "site-packages" in below.parts:
            return None
        return cls(file=below.as_posix(), line=line)


class Expected(Record):
    """An expectation that was written before the run: the outcome of a check for this trainer, and the reason.

    ``outcome`` is the expected outcome, and ``entry`` names the expectation. ``reproduction`` is a program that shows
    the failure without Plumbline. ``measured`` are the versions with which it was measured. ``library`` names the
    library and its version if the expectation is about a library that the subject uses. ``source`` is the line at which
    the expectation begins.
    """

    outcome: Outcome
    reason: Text
    link: Text | None = None
    reproduction: Text | None = None
    measured: Text | None = None
    entry: Text
    library: Text | None = None
    source: SourceLine | None = None


class ErrorGrid(Record):
    """The largest errors over ranks, in multiples of the noise. Rows are parameters or modules, columns are steps."""

    parameters: tuple[Text, ...]
    steps: tuple[Count, ...]
    errors: tuple[tuple[XNoise | None, ...], ...]


class RankShares(Record):
    """The weight of each rank's own gradient in the gradient that each rank's optimizer received.

    ``right`` has the weights that are right.
    """

    step: Count
    right: tuple[Figure, ...]
    received: tuple[tuple[Figure, ...], ...]


def fields_of(finding: Finding) -> dict[str, Any]:
    return vars(finding) | {"parameters": dict(finding.parameters)}


class FindingRecord(Record):
    """A finding about a cell or about a user's own training. Fields that do not apply are None.

    ``step`` counts optimizer steps from 0. ``error_x_noise`` is the error in multiples of the error that rounding alone
    explains, and ``limit_x_noise`` is the largest error of a right trainer. ``parameters`` has the error of each
    parameter at that step on that rank, in the model's order. ``consequence_of`` is the check whose finding explains
    this one; runs recorded by older versions have None. ``undeclared`` lists what an unsupported cell needs and its
    subject does not declare: ``backend dp``, ``precision 16``, or capabilities by name. ``hint`` says what to look at,
    as in the message. ``cause_x_noise`` is the distance of the evidence from what the cause predicts. The page draws
    ``error_grid`` and ``rank_shares``.
    """

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
    consequence_of: Text | None = None
    undeclared: tuple[Text, ...] = ()
    hint: Text | None = None
    cause_x_noise: XNoise | None = None
    error_grid: ErrorGrid | None = None
    rank_shares: RankShares | None = None


class Profile(Record):
    """The files of a measured cell's profiled launch, which is not one of the timed launches.

    ``files`` are relative to the run's folder. ``problems`` say what could not be written.
    """

    files: tuple[Text, ...] = ()
    problems: tuple[Text, ...] = ()


class Result(FindingRecord, CellRecord):
    """One finding about one cell. Fields that do not apply are None.

    ``reproduce`` is a command that runs only this cell. ``seconds`` is the wall time of the cell's launch, the same for
    all of its findings, and ``findings`` is their number. ``expected`` is the expectation about this finding.
    ``profile`` is set for a measured cell if a profile was requested. ``not_applicable`` says, by metric, why a
    measured cell has no figure.
    """

    type: Literal["result"] = "result"
    reproduce: Text = ""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    expected: Expected | None = None
    findings: AtLeastOne | None = None
    profile: Profile | None = None
    not_applicable: dict[Text, Text] = {}

    @property
    def is_known(self) -> bool:
        """Whether it is bad, with the outcome that was expected."""
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
        """Return the record of a finding. The middle of a very long message is left out."""
        message, half = finding.message, _LONGEST_MESSAGE // 2
        if len(message) > _LONGEST_MESSAGE:
            message = f"{message[:half]} … {message[-half:]}"
        further = {"reproduce": reproduce, "seconds": seconds, "expected": expected, "findings": findings}
        return cls(**_fields_of(cell), **{**fields_of(finding), "message": message, **further})


class TimelineChunk(Record):
    """A rank's computation for one stage and micro-batch, from ``begin`` to ``end`` in seconds of the step.

    ``kind`` is ``forward``, ``backward``, or ``weights`` if the gradients of weights are computed separately.
    """

    rank: Count
    stage: Count
    micro_batch: Count
    kind: Literal["forward", "backward", "weights"]
    begin: Figure
    end: Figure


class Measurement(CellRecord):
    """One figure of one cell, from timed launches.

    ``value`` is the figure in ``unit``. ``better`` says which direction is better, and is None if neither is.
    ``samples`` has the value of each launch, in order. ``low`` and ``high`` bound the figure with 95 % confidence. A
    figure that is too uncertain has no ``value``, and ``refusal`` says why. ``rank`` is the measured rank, None for all
    ranks. ``quantiles`` are evenly spaced quantiles of single steps, from the minimum to the maximum.
    ``timeline`` shows a pipeline's step, for its bubble. ``formula`` says how the figure is computed if that depends on
    the machine or on the cell. ``workload_key`` changes whenever the workload's definition changes.
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
    timeline: tuple[TimelineChunk, ...] = ()
    formula: Text | None = None
    refusal: Text | None = None
    rank: Count | None = None
    workload_key: Text = ""
    reproduce: Text = ""

    @classmethod
    def of(
        cls, cell: Cell, metric: str, unit: str, better: Literal["higher", "lower"] | None, **others: Any
    ) -> Measurement:
        """Return the record of a figure; ``others`` are fields by their names."""
        return cls(**_fields_of(cell), metric=metric, unit=unit, better=better, **others)


R = TypeVar("R", bound=CellRecord)
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by key. Keys and items stay in order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_cell(records: Iterable[R]) -> dict[Coordinates, list[R]]:
    return grouped(records, lambda record: record.coordinates)


def ending(results: Sequence[Result]) -> Outcome | Literal["known", "unexpected pass"]:
    """Return the outcome of a cell with these findings, at least one: the worst outcome that was not expected.

    The consequence of another finding counts only if nothing else is bad. Without unexpected bad findings, the outcome
    is an ``unexpected pass`` if a finding is better than expected, and ``known`` if bad findings were expected.
    """
    unknown = [result.outcome for result in results if not result.is_known]
    bad = [result for result in results if result.outcome.is_bad and not result.is_known]
    if bad:
        return worst(result.outcome for result in [one for one in bad if one.consequence_of is None] or bad)
    if any(result.is_unexpectedly_good for result in results):
        return UNEXPECTED_PASS
    return KNOWN if len(unknown) < len(results) else worst(unknown)


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
        "mesh": cell.topology.mesh_sizes,
    }
