"""Reads files of expectations: known failures of released trainers, and their reasons.

A subject can have one TOML file with its name. A subject without a file gets the entries that hold for its library
(``@subject(library=…)``) at the installed version. Such an entry covers only the exact finding (check, cell and cause)
and its consequences. The cell ends as *known*: the finding stands, but only the library can correct it. The entry also
covers a subject that makes the same mistake in its own code. If the finding does not appear, that is not an unexpected
pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import tomllib  # type: ignore[import-not-found, unused-ignore]  # the parent runs on Python 3.11
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from plumbline.core.backend import BACKENDS
from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.precision import PRECISIONS
from plumbline.core.software import Software
from plumbline.devices.types import accelerators
from plumbline.judge.checks import checks_of
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.results.records import Expected, SourceLine
from plumbline.workloads import WORKLOADS

FOLDER = "expectations"
"""The name of the files' folder, which lies next to the folder of the suite."""

REPRODUCTIONS = "reproductions"

_COORDINATES: Mapping[str, Collection[str]] = {
    "workload": WORKLOADS,
    "backend": BACKENDS,
    "precision": PRECISIONS,
    "accelerator": ("cpu", *accelerators()),
}
"""The valid names of each coordinate."""


class ExpectationsError(PlanError):
    """A file of expectations is missing or invalid."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_bad(outcome: Outcome) -> Outcome:
    if not outcome.is_bad:
        words = ", ".join(one.value for one in Outcome if one.is_bad)
        raise ValueError(f"{outcome.value!r} is not a failure; the outcome must be one of {words}")
    return outcome


def _is_check(name: str) -> str:
    known = (*checks_of(TraceAnalysis), "launch")
    if name not in known:
        raise ValueError(f"unknown check {name!r}; choose from {', '.join(known)}")
    return name


def _is_specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"{text!r} is not a version specifier such as ==2.6.* or >=2.5,<2.7") from None
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
    """Selects cells by one or more names for each coordinate. Names can contain ``*`` and ``?``. None matches any.

    ``topology`` is written as in a cell's id: ``1x3``.
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
                    raise ValueError(f"unknown {coordinate} {pattern!r}; choose from {', '.join(known)}")

    def covers(self, cell: Cell) -> bool:
        return all(
            patterns is None or any(fnmatchcase(str(getattr(cell, name)), pattern) for pattern in patterns)
            for name, patterns in vars(self).items()
        )


class Entry(_Strict):
    """One expected failure.

    Args:
        cell: the cells in which the failure occurs.
        check: the checks that end with ``outcome`` in each of these cells.
        outcome: how the checks end.
        cause: the expected causes. None: any.
        consequences: the checks that can fail because of the failure.
        versions: version specifiers (PEP 440) of the library; one of them must match. None: all versions.
        reason: why the failure is expected.
        link: a page about the failure.
        reproduction: a program that shows the failure.
        holds_for: only this file's ``subject``, or every subject that uses the ``library``, because the library's own
            code causes the failure and a subject cannot avoid it.
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
            raise ValueError("an entry that holds for the library must name cause and versions")

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
    """``measured`` is the library and version that failed; ``library`` is the library's name for pip."""

    measured: Line | None = None
    library: Line | None = None
    expected: tuple[Entry, ...] = ()

    def model_post_init(self, context: Any) -> None:
        if self.library is None and any(entry.holds_for == "library" for entry in self.expected):
            raise ValueError('an entry holds for the library, but the file does not name it: add library = "…"')


@dataclass(frozen=True)
class Expectation:
    """An entry, the record for findings that match it, and the library of its file."""

    entry: Entry
    record: Expected
    library: str | None = None

    @property
    def of_library(self) -> bool:
        """Whether the expectation applies to a subject because of the subject's library, not its name."""
        return self.record.library is not None

    def for_library(self, software: Software) -> Expectation:
        return replace(self, record=self.record.model_copy(update={"library": f"{self.library} {software.version}"}))


def read_expectations(folder: Path) -> dict[str, tuple[Expectation, ...]]:
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
            raise ExpectationsError(f"{file}, entry {number}: {REPRODUCTIONS}/{program} does not exist beside it")
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
    where = [part + 1 if isinstance(part, int) and index == 1 else part for index, part in enumerate(first["loc"])]
    if where[:1] == ["expected"] and len(where) > 1:
        where[:2] = [f"entry {where[1]}"]
    message = str(first["ctx"]["error"]) if "error" in first.get("ctx", {}) else first["msg"]
    if first["type"] == "extra_forbidden":
        message = "unknown key"
    return f"{', '.join(map(str, where))}: {message}"


def known_of_subject(
    name: str, software: Software, known: Mapping[str, Sequence[Expectation]]
) -> tuple[Expectation, ...]:
    """Return the expectations for a subject, from its own file or else for its library."""
    if name in known:
        return known_of(software, known[name])
    try:
        version = Version(software.version or "unknown")
    except InvalidVersion:
        return ()
    library = canonicalize_name(software.library or "")
    return tuple(
        one.for_library(software)
        for expectations in known.values()
        for one in expectations
        if one.entry.holds_for == "library" and canonicalize_name(one.library or "") == library
        if one.entry.applies_to(version)
    )


def known_of(software: Software, expectations: Sequence[Expectation]) -> tuple[Expectation, ...]:
    """Return the expectations that apply to the installed version."""
    naming = next((one for one in expectations if one.entry.versions is not None), None)
    if naming is None:
        return tuple(expectations)
    try:
        version = Version(software.version or "unknown")
    except InvalidVersion:
        raise ExpectationsError(
            f"{naming.record.entry} names versions, but the installed version of {software.library!r} is unknown: set "
            "@subject(library=…) to pip's name of an installed package"
        ) from None
    return tuple(one for one in expectations if one.entry.applies_to(version))


def expected(
    cell: Cell, findings: Sequence[Finding], expectations: Iterable[Expectation]
) -> tuple[Expected | None, ...]:
    """Return the expectation for each finding of ``cell``, or None.

    A finding has an expectation if an entry predicts it, if it is a consequence of such a finding, or if it passed
    although the subject's own file predicts a failure. Other failures have none.
    """
    about = [expectation for expectation in expectations if expectation.entry.cell.covers(cell)]
    met = [one for one in about if any(map(one.entry.matches, findings))]
    return tuple(_about(finding, about, met) for finding in findings)


def _about(finding: Finding, about: Sequence[Expectation], met: Sequence[Expectation]) -> Expected | None:
    for one in met:
        if one.entry.matches(finding):
            return one.record
    for one in met:
        if finding.check in one.entry.consequences and finding.outcome.is_bad:
            return one.record.model_copy(update={"outcome": finding.outcome})
    tried = finding.outcome in (Outcome.PASSED, Outcome.DEVIATES)
    owed = [one for one in about if tried and not one.of_library]
    return next((one.record for one in owed if finding.check in one.entry.check), None)
