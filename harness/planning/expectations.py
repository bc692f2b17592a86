"""What is known of a trainer beforehand: the failures that its released version shows, and why.

One TOML file a subject, called like the subject. An entry names cells, the check that ends badly in them, and the
reason; README says how it is written. Reading a file starts nothing, and matching is pure.

A subject without a file of its own that names a library (``@subject(library=…)``) gets the entries that hold for that
library at the installed version. They excuse less than a subject's own: only the very finding that was measured (check,
cell and cause), and what follows from it. Such a cell ends as *known*, with the reason and the link: the finding
stands, but the library has to change; a failure would ask for a correction that no user can make.
An entry holds for the library only where it says so (``holds_for = "library"``), and then it must name versions and
cause. It may say so where a subject that uses what the library offers for the purpose cannot avoid the finding, and not
where the code of the subject decides it. A subject that makes the same mistake by hand is excused as well; the reason
tells its author what was taken for the cause. No subject is expected to fail because of its library: where the finding
does not appear, that is no unexpected pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import tomllib
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from harness.core.accelerator import ACCELERATORS
from harness.core.backend import BACKENDS
from harness.core.cell import Cell
from harness.core.errors import PlanError
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.core.precision import PRECISIONS
from harness.core.software import Software
from harness.judge.checks import CHECKS
from harness.results.records import Expected
from harness.workloads import WORKLOADS

FOLDER = "expectations"
"""Where the files lie, beside the folder of the suite that is run."""

REPRODUCTIONS = "reproductions"

_COORDINATES = {
    "workload": tuple(WORKLOADS),
    "backend": tuple(BACKENDS),
    "precision": tuple(PRECISIONS),
    "accelerator": ACCELERATORS,
}


class ExpectationsError(PlanError):
    """A file of expectations is not there, or says something that cannot be meant."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_bad(outcome: Outcome) -> Outcome:
    if not outcome.is_bad:
        words = ", ".join(one.value for one in Outcome if one.is_bad)
        raise ValueError(f"nobody needs to expect {outcome.value!r}; it may be {words}")
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


class Pattern(_Strict):
    """Which cells: for each coordinate a name, or several, ``*`` and ``?`` included; what is left out is any.

    ``topology`` is nodes × gpus of each, as in a cell's id: ``1x3``.
    """

    workload: Names | None = None
    backend: Names | None = None
    topology: Names | None = None
    precision: Names | None = None
    accelerator: Names | None = None

    def model_post_init(self, context: Any) -> None:
        """Refuse a name that no cell can have."""
        for coordinate, known in _COORDINATES.items():
            for pattern in getattr(self, coordinate) or ():
                if not any(fnmatchcase(name, pattern) for name in known):
                    raise ValueError(f"there is no {coordinate} {pattern!r}; there are {', '.join(known)}")

    def covers(self, cell: Cell) -> bool:
        """Say whether ``cell`` is one of them."""
        values = {name: getattr(cell, name) for name in type(self).model_fields}
        return all(
            patterns is None or any(fnmatchcase(str(values[name]), pattern) for pattern in patterns)
            for name, patterns in self
        )


class Entry(_Strict):
    """One thing that is known.

    Each ``check`` ends so in each of the cells (where it is asked at all); ``consequences`` are checks that may end
    so because of it, and need not. With a ``cause``, or several, a finding of another cause is another thing.
    ``versions`` of the library under test, in any of these specifiers (PEP 440), are spoken of; without it all are.
    ``holds_for``: this file's ``subject`` alone, or everybody who uses the ``library``, because it is the library's own
    code that does it and nothing that the subject's file does with it.
    """

    cell: Pattern = Pattern()
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
        """Refuse to excuse everybody's trainer by an entry that does not say exactly what it excuses."""
        if self.holds_for == "library" and (self.cause is None or self.versions is None):
            raise ValueError("what holds for the library must name its cause and versions")

    def means(self, finding: Finding) -> bool:
        """Say whether this is the very finding that is expected."""
        return (
            finding.check in self.check
            and finding.outcome is self.outcome
            and (self.cause is None or finding.cause in self.cause)
        )

    def speaks_of(self, version: Version) -> bool:
        """Say whether this is known of a version of the library."""
        return self.versions is None or any(
            SpecifierSet(versions).contains(version, prereleases=True) for versions in self.versions
        )


class _File(_Strict):
    """``measured`` says what was seen to end so: a library and its version. ``library`` names it, as pip does."""

    measured: Line | None = None
    library: Line | None = None
    expected: tuple[Entry, ...] = ()

    def model_post_init(self, context: Any) -> None:
        """Refuse entries that hold for a library that has no name."""
        if self.library is None and any(entry.holds_for == "library" for entry in self.expected):
            raise ValueError('an entry holds for the library, and the file does not name it: library = "…"')


@dataclass(frozen=True)
class Expectation:
    """An entry, and as a record what is said of the findings that it speaks of; ``library`` is its file's."""

    entry: Entry
    said: Expected
    library: str | None = None

    @property
    def of_library(self) -> bool:
        """Whether it is applied to a subject because of its library, and not of its name."""
        return self.said.library is not None

    def for_library(self, software: Software) -> Expectation:
        """Return the same as it is applied to a subject that uses the library."""
        return replace(self, said=self.said.model_copy(update={"library": f"{self.library} {software.version}"}))


def read_expectations(folder: Path) -> dict[str, tuple[Expectation, ...]]:
    """Return what the files in ``folder`` expect, by subject; nothing where there is no folder.

    Raises:
        ExpectationsError: a file cannot be read, or an entry not be meant; the sentence names both.
    """
    return {file.stem: tuple(_read(file)) for file in sorted(folder.glob("*.toml"))}


def known_of_subject(
    name: str, software: Software, known: Mapping[str, Sequence[Expectation]]
) -> tuple[Expectation, ...]:
    """Return what is known of a subject: what its own file says, else what holds for its library at that version.

    Raises:
        ExpectationsError: as in :func:`known_of`, of its own file.
    """
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
        if one.entry.speaks_of(version)
    )


def known_of(software: Software, expectations: Sequence[Expectation]) -> tuple[Expectation, ...]:
    """Return the expectations that speak of the version that is there.

    Raises:
        ExpectationsError: an entry names versions, and nobody knows which one is there.
    """
    naming = next((one for one in expectations if one.entry.versions is not None), None)
    if naming is None:
        return tuple(expectations)
    try:
        version = Version(software.version or "unknown")
    except InvalidVersion:
        raise ExpectationsError(
            f"{naming.said.entry} names versions, and which one is there is not known: does @subject(library=…) name "
            f"the package under test, as pip does, and is it installed? It says {software.library!r}"
        ) from None
    return tuple(one for one in expectations if one.entry.speaks_of(version))


def expected(
    cell: Cell, findings: Sequence[Finding], expectations: Iterable[Expectation]
) -> tuple[Expected | None, ...]:
    """Return for each finding of ``cell`` what was expected of it, None where nothing was.

    That is said of a finding that ended as expected, of its consequences, and of one that did not end badly at all
    where it should have: not by what is known of its library, which it may do without. A finding that is bad otherwise
    is nothing that anybody expected.
    """
    about = [expectation for expectation in expectations if expectation.entry.cell.covers(cell)]
    met = [one for one in about if any(map(one.entry.means, findings))]
    return tuple(_about(finding, about, met) for finding in findings)


def _about(finding: Finding, about: Sequence[Expectation], met: Sequence[Expectation]) -> Expected | None:
    for one in met:
        if one.entry.means(finding):
            return one.said
    for one in met:
        if finding.check in one.entry.consequences and finding.outcome.is_bad:
            return one.said.model_copy(update={"outcome": finding.outcome})
    tried = finding.outcome in (Outcome.PASSED, Outcome.DEVIATES)
    owed = [one for one in about if tried and not one.of_library]
    return next((one.said for one in owed if finding.check in one.entry.check), None)


def _read(file: Path) -> Iterator[Expectation]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ExpectationsError(f"{file} cannot be read: {error}") from error
    try:
        read = _File.model_validate(values)
    except ValidationError as error:
        raise ExpectationsError(f"{file}, {_complaint(error)}") from error
    for number, entry in enumerate(read.expected, start=1):
        program = entry.reproduction
        if program is not None and not (file.parent / REPRODUCTIONS / program).is_file():
            raise ExpectationsError(f"{file}, entry {number}: there is no {REPRODUCTIONS}/{program} beside it")
        said = Expected(
            outcome=entry.outcome,
            reason=entry.reason,
            link=entry.link,
            reproduction=program and f"{REPRODUCTIONS}/{program}",
            measured=read.measured,
            entry=f"{file.name}, entry {number}",
        )
        yield Expectation(entry, said, read.library)


def _complaint(error: ValidationError) -> str:
    """Return what is wrong first, with the number of its entry, counted from 1."""
    first = error.errors(include_url=False)[0]
    where = [part + 1 if isinstance(part, int) and place == 1 else part for place, part in enumerate(first["loc"])]
    if where[:1] == ["expected"] and len(where) > 1:
        where[:2] = [f"entry {where[1]}"]
    said = str(first["ctx"]["error"]) if "error" in first.get("ctx", {}) else first["msg"]
    if first["type"] == "extra_forbidden":
        said = "there is no such key"
    return f"{', '.join(map(str, where))}: {said}"
