"""What the test function of one cell is handed: it examines the cell, or says what is known of it already."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness.core.errors import LaunchError
from harness.core.finding import Finding
from harness.core.finding_order import is_unexplained, told_first
from harness.core.outcome import Outcome
from harness.engine.examine import Examined, verdict
from harness.planning.plan import Planned
from harness.pytest_plugin.session import Session
from harness.pytest_plugin.xdist_transport import hand_over, say_outcome
from harness.report.tables.failures import as_consequence, is_wrong, parameter_table
from harness.results.records import KNOWN, Measurement, Result, ending


class ConformanceCase:
    """One planned cell of a session, as the test ``item``."""

    def __init__(self, session: Session, planned: Planned, item: pytest.Item) -> None:
        self._session = session
        self._planned = planned
        self._item = item
        self._evidence: str | None = None
        self._measurements: Sequence[Measurement] = ()

    def examine(self) -> None:
        """Train the cell, judge it, hand the findings over, and end the test as the verdict says.

        A cell that the resumed run has already ends as it did then.
        """
        recorded = self._session.recorded(self._planned.cell)
        if recorded is None and (reason := self._session.reason_not_to_run(self._planned.cell.subject)):
            pytest.skip(reason)  # without a record: the run is incomplete, and can be resumed
        self._end(recorded or self._examined(), recorded=recorded is not None)

    def _examined(self) -> Sequence[Result]:
        cell, session = self._planned.cell, self._session
        if self._planned.refusal:
            return self.declined()
        try:
            examined = self._tried()
        except LaunchError as error:
            # Not the subject's fault, as far as anybody can tell: once more, with another pool.
            examined = self._tried_again(error)
        return session.results(cell, examined.findings, self._reproduce(), examined.seconds)

    def declined(self) -> Sequence[Result]:
        """Return the record of a cell that its subject does not do; nothing is trained."""
        return self._session.results(self._planned.cell, (self._planned.declined,), self._reproduce(), None)

    def _reproduce(self) -> str:
        """Return the command that runs just this cell again, from where this one was called."""
        return self._session.reproduce(self._planned, self._item.path.parent)

    def _tried(self) -> Examined:
        ahead = self._session.launched(self._planned)
        self._evidence = str(ahead.folder)
        with ahead.lease:

            def meanwhile() -> None:
                ahead.lease.give_back_devices()  # what follows is computed on the CPU
                self._session.launch_ahead()

            return verdict(ahead.launched, self._planned.cell, meanwhile)

    def _tried_again(self, first: LaunchError) -> Examined:
        """Try a cell once more that the harness could not launch; the findings say so."""
        if self._evidence:
            shutil.rmtree(self._evidence, ignore_errors=True)
        try:
            examined = self._tried()
        except LaunchError as error:
            both = f"tried twice: {first}{'' if str(error) == str(first) else f'; then {error}'}"
            return Examined((Finding("launch", Outcome.ERRORED, both, cause="launcher-lost", family="launch"),), None)
        note = f"this cell was tried again, because {first}"
        others = tuple(finding for finding in examined.findings if finding.check != "launch")
        launch = next((finding for finding in examined.findings if finding.check == "launch"), None)
        told = Finding("launch", Outcome.PASSED, note)
        if launch is not None:
            told = replace(launch, message=f"{launch.message}\n{note}")
        return Examined((told, *others), examined.seconds)

    def _end(self, results: Sequence[Result], *, recorded: bool) -> None:
        end = ending(results)
        word = end.value if isinstance(end, Outcome) else end
        say_outcome(self._item, word)
        if not recorded:
            # Figures come first: with the last of its results a cell is whole.
            hand_over(self._item, (*self._measurements, *results), self._evidence)
        if end in (Outcome.UNSUPPORTED, Outcome.SKIPPED):
            pytest.skip(results[0].message)
        results = told_first(results)
        said = [told(result) for result in results if result.outcome.is_bad or result.expected]
        if end == KNOWN:
            pytest.skip("\n".join(said))
        if said:
            # pytest's summary shows this line alone.
            head = f"{self._planned.cell.id} {word}{', as recorded before' if recorded else ''}{_why(results)}"
            pytest.fail("\n".join([head, *said, f"reproduce: {results[0].reproduce}"]), pytrace=False)


def _why(results: Sequence[Result]) -> str:
    """Return what a cell went wrong by, where that has a name."""
    first = next((result for result in results if is_wrong(result)), None)
    return "" if first is None or is_unexplained(first) else f": {first.check}: {first.cause}"


def told(result: Result) -> str:
    """Return a finding as people read it where a test ends."""
    if (said := result.expected) is None:
        if result.consequence_of is not None:
            return as_consequence(result)
        table = parameter_table(tuple(result.parameters.items()), result.limit_x_noise)
        return "\n".join([f"{result.check}: {result.outcome.value}: {result.message}", *table])
    seen = f" with {said.measured}" if said.measured else ""
    if result.is_known:
        known = f"is known of {said.library}" if said.library else "is known"
        place = f"{said.entry}; {said.link}" if said.link else said.entry
        return f"{result.check}: {result.outcome.value}, which {known}: {said.reason} ({place})"
    return (
        f"{result.check}: {result.outcome.value}, and {said.outcome.value} was expected: {said.reason}\n"
        f"  so it was measured{seen}; if it has been mended, take the cell out of {said.entry}, or the entry"
    )
