"""Which expectations apply to a subject, and what they say about its findings. Pure.

A subject without a file of its own that names a library (``@subject(library=…)``) gets the entries that hold for that
library at the installed version. They excuse less than a subject's own: only exactly the finding that was measured
(check, cell and cause), and its consequences. Such a cell ends as *known*, with the reason and the link: the finding
stands, but the library has to change; a failure would ask for a correction that no user can make.

An entry holds for the library only where it says so (``holds_for = "library"``), and then it must name versions and
cause. It may say so where a subject that uses what the library offers for the purpose cannot avoid the finding, and not
where the code of the subject decides it. A subject that makes the same mistake by hand is excused as well; the reason
tells its author what was taken for the cause. No subject is expected to fail because of its library: where the finding
does not appear, that is no unexpected pass.
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
    """Return the expectations for a subject: those of its own file, else those for its library at that version.

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
        if one.entry.applies_to(version)
    )


def known_of(software: Software, expectations: Sequence[Expectation]) -> tuple[Expectation, ...]:
    """Return the expectations that apply to the installed version.

    Raises:
        ExpectationsError: an entry names versions, and the installed one is unknown.
    """
    naming = next((one for one in expectations if one.entry.versions is not None), None)
    if naming is None:
        return tuple(expectations)
    try:
        version = Version(software.version or "unknown")
    except InvalidVersion:
        raise ExpectationsError(
            f"{naming.record.entry} names versions, and the installed one is unknown: does @subject(library=…) name "
            f"the package under test, as pip does, and is it installed? It says {software.library!r}"
        ) from None
    return tuple(one for one in expectations if one.entry.applies_to(version))


def expected(
    cell: Cell, findings: Sequence[Finding], expectations: Iterable[Expectation]
) -> tuple[Expected | None, ...]:
    """Return for each finding of ``cell`` what was expected of it, None where nothing was.

    Something was expected of a finding that ended as an entry says, of its consequences, and of one that should have
    failed by the subject's own file and did not. What holds for a library need not fail in every subject. A finding
    that is bad in another way was not expected.
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
