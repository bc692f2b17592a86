"""The estimate of a dry run as JSON, for programs. ``dry_run.schema.json`` is the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from plumbline.check.command.checked_command import CheckedCommand
from plumbline.check.judge.estimate import CostEstimate
from plumbline.check.report.json_file import Script
from plumbline.results.fields import Count, Text, document_schema

VERSION: Final = 1
"""Version of the schema. Adding a field does not change it."""

FILE: Final = Path(__file__).with_name("dry_run.schema.json")


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

    version: Literal[1] = VERSION
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
    return document_schema(DryRunDocument, "dry-run", VERSION)
