"""Files of expectations: the failures that a trainer's released version is known to show, and why.

One TOML file a subject, called like the subject. An entry names cells, the check that ends badly in them, and the
reason. Reading a file starts nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import tomllib  # type: ignore[import-not-found, unused-ignore]  # the parent runs on Python 3.11
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from plumbline.core.accelerator import ACCELERATORS
from plumbline.core.backend import BACKENDS
from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.precision import PRECISIONS
from plumbline.core.software import Software
from plumbline.judge.checks import CHECKS
from plumbline.results.records import Expected, SourceLine
from plumbline.workloads import WORKLOADS

FOLDER = "expectations"
"""Where the files lie, beside the folder of the suite that is run."""

REPRODUCTIONS = "reproductions"

_COORDINATES: Mapping[str, Collection[str]] = {
    "workload": WORKLOADS,
    "backend": BACKENDS,
    "precision": PRECISIONS,
    "accelerator": ACCELERATORS,
}
"""The names that a coordinate may have."""


class ExpectationsError(PlanError):
    """A file of expectations is missing or invalid."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_bad(outcome: Outcome) -> Outcome:
    if not outcome.is_bad:
        words = ", ".join(one.value for one in Outcome if one.is_bad)
        raise ValueError(f"{outcome.value!r} needs no expectation; the outcome may be {words}")
    return outcome


def _is_check(name: str) -> str:
    known = (*CHECKS, "launch")  # looked up at each use: a check may be registered later, from outside
    if name not in known:
        raise ValueError(f"there is no check {name!r}; there are {', '.join(known)}")
    return name


def _is_specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"{text!r} specifies no versions, as ==2.6.* and >=2.5,<2.7 do") from None
    return text


Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Checks = Annotated[tuple[Annotated[str, AfterValidator(_is_check)], ...], BeforeValidator(_listed)]
Names = Annotated[tuple[Line, ...], BeforeValidator(_listed), Field(min_length=1)]

Versions = Annotated[
    tuple[Annotated[Line, AfterValidator(_is_specifier)], ...], BeforeValidator(_listed), Field(min_length=1)
]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CellPattern(_Strict):
    """Which cells: for each coordinate a name, or several, ``*`` and ``?`` included; what is left out is any.

    ``topology`` is nodes × gpus of each, as in a cell's id: ``1x3``.
    """

    workload: Names | None = None
    backend: Names | None = None
    topology: Names | None = None
    precision: Names | None = None
    accelerator: Names | None = None

    def model_post_init(self, context: Any) -> None:
        for coordinate, known in _COORDINATES.items():
            for pattern in getattr(self, coordinate) or ():
                if not any(fnmatchcase(name, pattern) for name in known):
                    raise ValueError(f"there is no {coordinate} {pattern!r}; there are {', '.join(known)}")

    def covers(self, cell: Cell) -> bool:
        values = {name: getattr(cell, name) for name in type(self).model_fields}
        return all(
            patterns is None or any(fnmatchcase(str(values[name]), pattern) for pattern in patterns)
            for name, patterns in self
        )


class Entry(_Strict):
    """One expected failure.

    Each ``check`` that is run ends with ``outcome`` in each of the cells; ``consequences`` are checks that may end so
    because of it. With a ``cause``, or several, a finding of another cause is not expected. The entry applies to the
    ``versions`` of the library under test that match any of these specifiers (PEP 440), without them to all.
    ``holds_for``: this file's ``subject`` alone, or every subject that uses the ``library``, where the library's own
    code causes the failure and the subject's file cannot avoid it.
    """

    cell: CellPattern = CellPattern()
    check: Annotated[Checks, Field(min_length=1)]
    outcome: Annotated[Outcome, AfterValidator(_is_bad)] = Outcome.FAILED
    cause: Names | None = None
    consequences: Checks = ()
    versions: Versions | None = None
    reason: Line
    link: Line | None = None
    reproduction: Line | None = None
    holds_for: Literal["subject", "library"] = "subject"

    def model_post_init(self, context: Any) -> None:
        if self.holds_for == "library" and (self.cause is None or self.versions is None):
            raise ValueError("what holds for the library must name its cause and versions")

    def matches(self, finding: Finding) -> bool:
        return (
            finding.check in self.check
            and finding.outcome is self.outcome
            and (self.cause is None or finding.cause in self.cause)
        )

    def applies_to(self, version: Version) -> bool:
        return self.versions is None or any(
            SpecifierSet(versions).contains(version, prereleases=True) for versions in self.versions
        )


class _File(_Strict):
    """``measured`` is the library and version with which the failures were seen; ``library`` is its name for pip."""

    measured: Line | None = None
    library: Line | None = None
    expected: tuple[Entry, ...] = ()

    def model_post_init(self, context: Any) -> None:
        if self.library is None and any(entry.holds_for == "library" for entry in self.expected):
            raise ValueError('an entry holds for the library, and the file does not name it: library = "…"')


@dataclass(frozen=True)
class Expectation:
    """An entry, and the record that goes with the findings that it expects; ``library`` is its file's."""

    entry: Entry
    record: Expected
    library: str | None = None

    @property
    def of_library(self) -> bool:
        """Whether it applies to a subject because of its library, and not because of its name."""
        return self.record.library is not None

    def for_library(self, software: Software) -> Expectation:
        return replace(self, record=self.record.model_copy(update={"library": f"{self.library} {software.version}"}))


def read_expectations(folder: Path) -> dict[str, tuple[Expectation, ...]]:
    """Return what the files in ``folder`` expect, by subject; nothing where there is no folder.

    Raises:
        ExpectationsError: a file cannot be read, or an entry is invalid; the message names both.
    """
    return {file.stem: tuple(_read(file)) for file in sorted(folder.glob("*.toml"))}


def _read(file: Path) -> Iterator[Expectation]:
    try:
        text = file.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ExpectationsError(f"{file} cannot be read: {error}") from error
    try:
        read = _File.model_validate(values)
    except ValidationError as error:
        raise ExpectationsError(f"{file}, {_complaint(error)}") from error
    lines = [number for number, line in enumerate(text.splitlines(), start=1) if line.strip() == "[[expected]]"]
    for number, entry in enumerate(read.expected, start=1):
        program = entry.reproduction
        if program is not None and not (file.parent / REPRODUCTIONS / program).is_file():
            raise ExpectationsError(f"{file}, entry {number}: there is no {REPRODUCTIONS}/{program} beside it")
        record = Expected(
            outcome=entry.outcome,
            reason=entry.reason,
            link=entry.link,
            reproduction=program and f"{REPRODUCTIONS}/{program}",
            measured=read.measured,
            entry=f"{file.name}, entry {number}",
            source=SourceLine.of(file, lines[number - 1]) if len(lines) == len(read.expected) else None,
        )
        yield Expectation(entry, record, read.library)


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = [part + 1 if isinstance(part, int) and place == 1 else part for place, part in enumerate(first["loc"])]
    if where[:1] == ["expected"] and len(where) > 1:
        where[:2] = [f"entry {where[1]}"]
    message = str(first["ctx"]["error"]) if "error" in first.get("ctx", {}) else first["msg"]
    if first["type"] == "extra_forbidden":
        message = "there is no such key"
    return f"{', '.join(map(str, where))}: {message}"
