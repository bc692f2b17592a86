"""The verdict as JSON: all of it, in full precision, for programs. ``check.schema.json`` is the schema.

The schema of the estimate of a dry run is ``dry_run.schema.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from plumbline.check.command.checked_command import CheckedCommand
from plumbline.check.command.running import CommandEnd, EndedBy
from plumbline.check.judge.coverage import Coverage
from plumbline.check.judge.estimate import CostEstimate
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.verdict.description import describe
from plumbline.check.verdict.verdict import Answer, Verdict, answer_of, notes_on, sentence_on
from plumbline.core.finding import Finding
from plumbline.judge.findings import Information
from plumbline.results.fields import Count, Text, document_schema
from plumbline.results.records import FindingRecord, SourceLine, fields_of

VERSION: Final = 1
"""Version of the schema. Adding a field does not change it."""

FILE: Final = Path(__file__).with_name("check.schema.json")


class CheckFinding(FindingRecord):
    """What one check found. Fields that do not apply are null. If ``information`` is true, it is only a note."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    information: bool

    @classmethod
    def of(cls, finding: Finding) -> CheckFinding:
        return cls(**fields_of(finding), information=isinstance(finding, Information))


class Uncovered(BaseModel):
    """Parameters that were not judged, and why. They have ``entries`` entries in total."""

    model_config = ConfigDict(from_attributes=True)

    names: tuple[Text, ...]
    entries: Count
    why: Text


class CheckCoverage(BaseModel):
    """How much of a training was judged.

    ``parameters`` is the number of trainable entries. The gradients of the share ``compared`` were judged, and the
    updates of the share ``updates``. The gradients of the share ``replayed`` were recomputed in float64, at least in
    the first step of each kind. Each list has the parameters that were left out, and why.
    """

    parameters: Count
    compared: float
    updates: float
    replayed: float
    uncovered: tuple[Uncovered, ...]
    gradients_left_out: tuple[Uncovered, ...]
    updates_left_out: tuple[Uncovered, ...]

    @classmethod
    def of(cls, coverage: Coverage) -> CheckCoverage:
        values = {
            "parameters": coverage.entries,
            "compared": coverage.gradients.part,
            "updates": coverage.updates.part,
            "replayed": coverage.replays.part,
            "uncovered": coverage.replays.left_out,
            "gradients_left_out": coverage.gradients.left_out,
            "updates_left_out": coverage.updates.left_out,
        }
        return cls.model_validate(values)


class CheckTraining(BaseModel):
    """One training of the command.

    ``notes`` are sentences that stand under the verdict, also among ``findings``. ``steps_at`` is the line of the
    script in which its first step was taken.
    """

    verdict: Answer
    sentence: Text
    notes: tuple[Text, ...]
    ranks: Count
    steps: Count
    backward_passes: tuple[Count, Count]
    optimizers: tuple[Text, ...]
    precision: tuple[Text, ...]
    wrappers: tuple[Text, ...]
    steps_at: SourceLine | None
    coverage: CheckCoverage
    findings: tuple[CheckFinding, ...]

    @classmethod
    def of(cls, one: CheckedTraining) -> CheckTraining:
        what = describe(one.training)
        place = what.steps_at
        return cls(
            verdict=answer_of(one),
            sentence=sentence_on(one),
            notes=tuple(notes_on(one)),
            ranks=what.ranks,
            steps=what.steps,
            backward_passes=what.passes,
            optimizers=tuple(what.optimizers),
            precision=tuple(what.precision),
            wrappers=tuple(what.wrappers),
            steps_at=place and SourceLine(file=place[0], line=place[1]),
            coverage=CheckCoverage.of(one.coverage),
            findings=tuple(map(CheckFinding.of, one.findings)),
        )


class Window(BaseModel):
    """Steps, from ``step`` on, that were judged while the command ran."""

    model_config = ConfigDict(from_attributes=True)

    step: Count
    verdict: Answer
    sentence: Text


class Script(BaseModel):
    """How the command ended: its exit code, what ended it, and how many seconds it ran."""

    exit_code: int | None
    ended_by: EndedBy
    seconds: float

    @classmethod
    def of(cls, end: CommandEnd) -> Script:
        return cls(exit_code=end.exit_code, ended_by=end.by, seconds=end.seconds)


class CheckDocument(BaseModel):
    """The document that ``plumbline check --json`` writes.

    ``next_step`` says what to do so that more can be judged. It is empty if nothing is needed or known. ``settings``
    are the options from ``pyproject.toml``.
    """

    version: Literal[1] = VERSION
    command: tuple[Text, ...]
    exit_code: int
    verdict: Answer
    sentence: Text
    next_step: Text
    incidents: tuple[Text, ...]
    script: Script
    judging_seconds: float
    trainings: tuple[CheckTraining, ...]
    windows: tuple[Window, ...]
    settings: dict[Text, JsonValue]


def as_json(checked: CheckedCommand, verdict: Verdict) -> str:
    """Return the document. Values that do not apply are null; an infinite number is the string ``inf``."""
    document = CheckDocument(
        command=tuple(checked.command),
        exit_code=verdict.exit_code,
        verdict=verdict.answer,
        sentence=verdict.sentence,
        next_step=verdict.next_step,
        incidents=tuple(verdict.incidents),
        script=Script.of(checked.end),
        judging_seconds=checked.judging_s,
        trainings=tuple(map(CheckTraining.of, checked.trainings)),
        windows=tuple(map(Window.model_validate, checked.windows)),
        settings=dict(checked.settings),
    )
    return f"{document.model_dump_json(indent=2)}\n"


def check_schema() -> dict[str, Any]:
    return document_schema(CheckDocument, "check", VERSION)


DRY_RUN_VERSION: Final = 1
"""Version of the schema. Adding a field does not change it."""

DRY_RUN_FILE: Final = Path(__file__).with_name("dry_run.schema.json")


class StepCost(BaseModel):
    """Seconds that one step takes on the slowest rank: plain, recorded, and to recompute its gradients."""

    plain_seconds: float
    recorded_seconds: float
    replay_seconds: float


class TrainingCost(BaseModel):
    """The estimated cost of recording the steps of a training.

    ``seconds`` and ``seconds_without_check`` are the times of these steps with and without the check. Each rank needs
    ``memory_bytes`` of additional memory, and has ``parameter_bytes`` of parameters. The files of all ranks take
    ``evidence_bytes``.
    """

    ranks: Count
    seconds: float
    seconds_without_check: float
    step: StepCost
    memory_bytes: Count
    parameter_bytes: Count
    evidence_bytes: Count

    @classmethod
    def of(cls, one: CostEstimate, steps: int) -> TrainingCost:
        return cls(
            ranks=one.ranks,
            seconds=one.checked_s(steps),
            seconds_without_check=one.unchecked_s(steps),
            step=StepCost(plain_seconds=one.plain_s, recorded_seconds=one.recorded_s, replay_seconds=one.replay_s),
            memory_bytes=one.extra_bytes,
            parameter_bytes=one.parameter_bytes,
            evidence_bytes=one.all_evidence_bytes(steps),
        )


class DryRunDocument(BaseModel):
    """The document that ``plumbline check --dry-run --json`` writes.

    ``trainings`` has only trainings whose cost could be measured. If there are none, ``obstacle`` says why, and is null
    otherwise.
    """

    version: Literal[1] = DRY_RUN_VERSION
    command: tuple[Text, ...]
    exit_code: int
    steps: Count
    obstacle: Text | None
    script: Script
    trainings: tuple[TrainingCost, ...]


def dry_run_json(checked: CheckedCommand, steps: int, obstacle: str | None, exit_code: int) -> str:
    document = DryRunDocument(
        command=checked.command,
        exit_code=exit_code,
        steps=steps,
        obstacle=obstacle,
        script=Script.of(checked.end),
        trainings=tuple(TrainingCost.of(one.estimate, steps) for one in checked.trainings if one.estimate),
    )
    return f"{document.model_dump_json(indent=2)}\n"


def dry_run_schema() -> dict[str, Any]:
    return document_schema(DryRunDocument, "dry-run", DRY_RUN_VERSION)
