"""What ``plumbline show``, ``doctor`` and ``subjects`` print with ``--json``. ``*.schema.json`` are the schemas."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from plumbline.machine.doctor.installations import ProbeResult
from plumbline.report.one_cell import cell_outcomes
from plumbline.results.fields import Text, document_schema
from plumbline.results.files import log_tails, trace_folder
from plumbline.results.records import Measurement, Result
from plumbline.results.run import Run
from plumbline.subjects.load import Shipped
from plumbline.subjects.virtual_environments import environments

VERSION: Final = 1
"""The version of each schema. Adding a field does not change it."""


class CellLog(BaseModel):
    """The last lines that some ranks wrote."""

    ranks: Text
    tail: Text


class CellDocument(BaseModel):
    """Everything that a run has on one cell. ``findings`` and ``figures`` are its records, as in ``results.jsonl``.

    ``reproduce`` is a command that runs just this cell, ``traces`` the folder of its evidence; null where there is
    none.
    """

    version: Literal[1] = VERSION
    run: Text
    cell: Text
    outcome: Text
    findings: tuple[Result, ...]
    figures: tuple[Measurement, ...]
    reproduce: Text | None
    traces: Text | None
    logs: tuple[CellLog, ...]

    @classmethod
    def of(cls, run: Run, cell: str) -> CellDocument:
        findings = tuple(one for one in run.results if one.cell == cell)
        figures = tuple(one for one in run.measurements if one.cell == cell)
        records: list[Result | Measurement] = [*findings, *figures]
        traces = trace_folder(run.path, cell)
        return cls(
            run=run.header.run_id,
            cell=cell,
            outcome=cell_outcomes(run)[cell],
            findings=findings,
            figures=figures,
            reproduce=next(filter(None, (one.reproduce for one in records)), None),
            traces=None if traces is None else str(traces),
            logs=tuple(CellLog(ranks=ranks, tail=tail) for ranks, tail in log_tails(run.path, cell)),
        )


class Answer(BaseModel):
    """What one probe found. ``advice`` is null where ``state`` is ``ok``."""

    probe: Text
    state: Literal["ok", "note", "problem"]
    found: Text
    advice: Text | None

    @classmethod
    def of(cls, probe: str, line: ProbeResult) -> Answer:
        state: Any = "ok" if line.advice is None else "note" if line.is_note else "problem"
        return cls(probe=probe, state=state, found=line.found, advice=line.advice)


class DoctorDocument(BaseModel):
    """What this machine has for a run. ``ready``: there is no problem."""

    version: Literal[1] = VERSION
    ready: bool
    answers: tuple[Answer, ...]

    @classmethod
    def of(cls, lines: Iterable[tuple[str, ProbeResult]]) -> DoctorDocument:
        answers = tuple(Answer.of(probe, line) for probe, line in lines)
        return cls(ready=all(one.state != "problem" for one in answers), answers=answers)


class Declared(BaseModel):
    """What a trainer supports: backends, the precisions of each type of device (``*``: of all others), capabilities."""

    backends: tuple[Text, ...]
    precisions: dict[Text, tuple[Text, ...]]
    capabilities: tuple[Text, ...]


class ShippedSubject(BaseModel):
    """A trainer that ships. ``library`` is null if it is not installed, ``obstacle`` unless it cannot be imported."""

    name: Text
    library: Text | None
    obstacle: Text | None
    declared: tuple[Declared, ...]

    @classmethod
    def of(cls, one: Shipped) -> ShippedSubject:
        declared = tuple(
            Declared(
                backends=tuple(each.backends),
                precisions={device: tuple(names) for device, names in each.precisions.items()},
                capabilities=tuple(sorted(each.capabilities)),
            )
            for each in one.declared
        )
        return cls(name=one.name, library=one.library, obstacle=one.obstacle, declared=declared)


class Environment(BaseModel):
    """A separate environment that ``plumbline subjects install`` made, and its interpreter."""

    name: Text
    python: Text


class SubjectsDocument(BaseModel):
    """The trainers that ship, and the separate environments that exist for them."""

    version: Literal[1] = VERSION
    subjects: tuple[ShippedSubject, ...]
    environments: tuple[Environment, ...]

    @classmethod
    def of(cls, subjects: Iterable[Shipped]) -> SubjectsDocument:
        return cls(
            subjects=tuple(map(ShippedSubject.of, subjects)),
            environments=tuple(Environment(name=name, python=str(python)) for name, python in environments()),
        )


FILES: Final = {
    Path(__file__).with_name(f"{name}.schema.json"): (name, document)
    for name, document in (("show", CellDocument), ("doctor", DoctorDocument), ("subjects", SubjectsDocument))
}


def print_document(document: BaseModel) -> None:
    print(document.model_dump_json(indent=2))


def schema_in(file: Path) -> dict[str, Any]:
    name, document = FILES[file]
    return document_schema(document, name, VERSION)
