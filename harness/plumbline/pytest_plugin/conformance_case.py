"""The test of a cell that is trained and judged, or taken from the run that is resumed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

import pytest

from plumbline.core.errors import LaunchError
from plumbline.core.finding import Finding, in_reading_order, is_unexplained
from plumbline.core.outcome import Outcome
from plumbline.engine.examine import Examined
from plumbline.planning.expectation_files import expected
from plumbline.planning.plan import Planned
from plumbline.pytest_plugin.session import Session
from plumbline.pytest_plugin.xdist_transport import attach_outcome, attach_payload, attach_properties
from plumbline.report.tables.failures import describe, is_wrong
from plumbline.report.text import printable_lines
from plumbline.results.records import KNOWN, Measurement, Result, ending


class ConformanceCase:
    """A planned cell, as the test ``item``."""

    def __init__(self, session: Session, planned: Planned, item: pytest.Item) -> None:
        self._session = session
        self._planned = planned
        self._item = item
        self._evidence: str | None = None
        self._profile: str | None = None
        self._measurements: Sequence[Measurement] = ()

    def examine(self) -> None:
        cell = self._planned.cell
        recorded = self._session.recording.known(cell)
        if recorded is None and (reason := self._session.timeouts.reason(cell.subject)):
            pytest.skip(reason)  # without a record, so that the run can be resumed
        self._end(recorded or self._examine(), recorded=recorded is not None)

    def _examine(self) -> Sequence[Result]:
        if self._planned.refusal:
            return self.declined()
        try:
            examined = self._train_and_judge()
        except LaunchError as error:
            # A failed launch says nothing about the subject. Try once more, with another pool.
            examined = self._try_again(error)
        return self._results(examined.findings, examined.seconds)

    def declined(self) -> Sequence[Result]:
        """Return the record of a cell that its subject does not declare, without training."""
        return self._results((self._planned.declined,), None)

    def _reproduce(self) -> str:
        return self._session.reproduce(self._planned, self._item.path.parent)

    def _results(self, findings: Sequence[Finding], seconds: float | None) -> list[Result]:
        cell, session, reproduce = self._planned.cell, self._session, self._reproduce()
        if session.timeouts.count(cell.subject, seconds):
            session.notify(str(session.timeouts.reason(cell.subject)))
        known = expected(cell, findings, session.expectations[cell.subject])
        return [
            Result.of(cell, finding, reproduce, seconds, entry, len(findings))
            for finding, entry in zip(findings, known, strict=True)
        ]

    def _train_and_judge(self) -> Examined:
        cell = self._session.cells_in_flight.launch(self._planned)
        self._evidence = str(cell.folder)
        return self._session.cells_in_flight.wait_for_verdict(cell, self._session.upcoming_cells())

    def _try_again(self, first: LaunchError) -> Examined:
        if self._evidence:
            shutil.rmtree(self._evidence, ignore_errors=True)
        try:
            examined = self._train_and_judge()
        except LaunchError as error:
            both = f"failed twice: {first}{'' if str(error) == str(first) else f'; then {error}'}"
            return Examined((Finding("launch", Outcome.ERRORED, both, cause="launcher-lost", family="launch"),), None)
        note = f"the first attempt failed: {first}"
        others = tuple(finding for finding in examined.findings if finding.check != "launch")
        launch = next((finding for finding in examined.findings if finding.check == "launch"), None)
        if launch is None:
            launch = Finding("launch", Outcome.PASSED, note)
        else:
            launch = replace(launch, message=f"{launch.message}\n{note}")
        return Examined((launch, *others), examined.seconds)

    def _end(self, results: Sequence[Result], *, recorded: bool) -> None:
        end = ending(results)
        word = end.value if isinstance(end, Outcome) else end
        results = in_reading_order(results)
        attach_outcome(self._item, word)
        attach_properties(self._item, results)
        if not recorded:
            # Measurements come first: a cell is complete when its last result has been written.
            attach_payload(self._item, (*self._measurements, *results), self._evidence, self._profile)
        if end in (Outcome.UNSUPPORTED, Outcome.SKIPPED):
            pytest.skip(printable_lines(results[0].message))
        paragraphs = [describe(result) for result in results if result.outcome.is_bad or result.expected]
        if end == KNOWN:
            pytest.skip(printable_lines("\n".join(paragraphs)))
        if paragraphs:
            # pytest's short summary shows only the first line.
            head = f"{self._planned.cell.id} {word}{', as recorded before' if recorded else ''}{_cause(results)}"
            # A subject's text may contain control characters.
            text = printable_lines("\n".join([head, *paragraphs, f"reproduce: {results[0].reproduce}"]))
            pytest.fail(text, pytrace=False)


def _cause(results: Sequence[Result]) -> str:
    first = next((result for result in results if is_wrong(result)), None)
    return "" if first is None or is_unexplained(first) else f": {first.check}: {first.cause}"
