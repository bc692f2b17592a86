"""Which expectations apply to a subject, and what they say about its findings.

A subject without its own file gets the entries that hold for its library (``@subject(library=…)``) at the installed
version. Such an entry covers only the exact finding (check, cell and cause) and its consequences. The cell ends as
*known*: the finding stands, but only the library can correct it. A subject that makes the same mistake itself is
covered too. If the finding does not appear, that is not an unexpected pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.software import Software
from plumbline.planning.expectation_files import Expectation, ExpectationsError
from plumbline.results.records import Expected


def known_of_subject(
    name: str, software: Software, known: Mapping[str, Sequence[Expectation]]
) -> tuple[Expectation, ...]:
    """Return the expectations for a subject: those of its own file, or else those for its library.

    Raises:
        ExpectationsError: its file names versions, and the installed version is unknown.
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
        if one.entry.applies_to(version)
    )


def known_of(software: Software, expectations: Sequence[Expectation]) -> tuple[Expectation, ...]:
    """Return the expectations that apply to the installed version.

    Raises:
        ExpectationsError: an entry names versions, and the installed version is unknown.
    """
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
    """Return the expectation for each finding of ``cell``, None if there is none.

    There is one for a finding that an entry predicts, for its consequences, and for a finding that passed although the
    subject's own file predicts a failure. There is none for any other failure.
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
