"""The tests of cells: trained and judged, or timed by pytest-benchmark, or taken from the run that is resumed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from plumbline.benchmark.launch_metrics import SamplesError
from plumbline.benchmark.measurements import measurements, not_applicable
from plumbline.benchmark.timed_launch import Begin, PairedRounds, TimedLaunch, TimedLaunchError, profiled
from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, SubjectError
from plumbline.core.finding import Finding, in_reading_order, is_unexplained
from plumbline.core.outcome import Outcome
from plumbline.core.training_behavior import of_accelerator
from plumbline.engine.examine import Examined
from plumbline.launch.pool import Pool
from plumbline.machine.fingerprint import device_name
from plumbline.machine.lease import exclusive_lease
from plumbline.planning.plan import Planned
from plumbline.pytest_plugin.run_on_disk import attach_outcome, attach_payload, attach_properties
from plumbline.pytest_plugin.session import Session
from plumbline.report.tables.failures import describe, is_wrong
from plumbline.report.text import printable_lines
from plumbline.results.records import KNOWN, Measurement, Profile, Result, ending
from plumbline.results.records import PERFORMANCE as CHECK
from plumbline.subjects.load import parse_subject
from plumbline.workloads import PERFORMANCE


class ConformanceCase:
    """A planned cell, as the test ``item``."""

    def __init__(self, session: Session, planned: Planned, item: pytest.Item) -> None:
        self._session = session
        self._planned = planned
        self._item = item
        self._suite = item.path.parent
        self._evidence: str | None = None
        self._profile: str | None = None
        self._measurements: Sequence[Measurement] = ()

    def run(self) -> None:
        cell = self._planned.cell
        recorded = self._session.run_on_disk.known(cell)
        if recorded is None and (reason := self._session.timeouts.reason(cell.subject)):
            pytest.skip(reason)  # without a record, so that the run can be resumed
        self._end(recorded or self._train(), recorded=recorded is not None)

    def _train(self) -> Sequence[Result]:
        if self._planned.refusal:
            return self._session.declined(self._planned, self._suite)
        try:
            examined = self._train_and_judge()
        except LaunchError as error:
            # A failed launch says nothing about the subject. Try once more, with another pool.
            examined = self._try_again(error)
        return self._results(examined.findings, examined.seconds)

    def _results(self, findings: Sequence[Finding], seconds: float | None) -> list[Result]:
        cell, session = self._planned.cell, self._session
        if session.timeouts.count(cell.subject, seconds):
            session.notify(str(session.timeouts.reason(cell.subject)))
        return session.results(self._planned, findings, seconds, self._suite)

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
        launch = (
            replace(launch, message=f"{launch.message}\n{note}") if launch else Finding("launch", Outcome.PASSED, note)
        )
        return Examined((launch, *others), examined.seconds)

    def _end(self, results: Sequence[Result], *, recorded: bool) -> None:
        end = ending(results)
        results = in_reading_order(results)
        attach_outcome(self._item, str(end))
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
            first = next((result for result in results if is_wrong(result)), None)
            cause = "" if first is None or is_unexplained(first) else f": {first.check}: {first.cause}"
            # pytest's short summary shows only the first line.
            head = f"{self._planned.cell.id} {end}{', as recorded before' if recorded else ''}{cause}"
            # A subject's text may contain control characters.
            text = printable_lines("\n".join([head, *paragraphs, f"reproduce: {results[0].reproduce}"]))
            pytest.fail(text, pytrace=False)


YARDSTICKS = "yardsticks.py"  # the file of the hand-written loops, in the suite's folder


class BenchmarkCase(ConformanceCase):
    """A planned cell that is measured, as the test ``item``."""

    def measure(self, benchmark: Any) -> None:
        recorded = self._session.run_on_disk.known(self._planned.cell)
        self._end(recorded or self._measure(benchmark), recorded=recorded is not None)

    def _measure(self, benchmark: Any) -> Sequence[Result]:
        if self._planned.refusal:
            return self._session.declined(self._planned, self._suite)
        session, cell, seconds = self._session, self._planned.cell, None
        further: dict[str, Any] = {}
        try:
            rounds, profile = self._time(benchmark)
            seconds = sum(launch.timed.seconds for launch in rounds.launches)
            device = device_name(cell.accelerator)
            self._measurements = measurements(
                cell, rounds.launches, session.reproduce(self._planned, self._suite), device
            )
            further = {"profile": profile, "not_applicable": not_applicable(cell, rounds.launches, device)}
            finding = _finding(self._measurements)
        except TimedLaunchError as failed:
            finding, self._evidence = failed.finding, str(failed.folder)
        except (LaunchError, SubjectError, SamplesError) as error:
            finding = Finding(CHECK, Outcome.ERRORED, str(error))
        for figure in self._measurements:
            name = figure.metric if figure.rank is None else f"{figure.metric} of rank {figure.rank}"
            shown = {"value", "low", "high", "unit", "refusal"}
            benchmark.extra_info[name] = figure.model_dump(include=shown, exclude_none=True)
        (result,) = self._results((finding,), seconds)
        return [result.model_copy(update=further)]

    def _time(self, benchmark: Any) -> tuple[PairedRounds, Profile | None]:
        cell, session = self._planned.cell, self._session
        launches, rounds = session.options.launches, PERFORMANCE[cell.workload].rounds
        benchmark.group = f"{cell.workload} {cell.precision}"
        locator = session.pools.locator_of(cell.subject)
        session.cells_in_flight.discard()
        with exclusive_lease():
            # In the subject's interpreter, so that both use the same torch.
            _, python = parse_subject(locator)
            loops = str(self._suite / YARDSTICKS) + (f";python={python}" if python else "")
            own, by_hand = session.pools.for_measuring.several(locator, loops, count=launches)
            (loop,) = by_hand[0].subjects
            precisions = of_accelerator(loop["precisions"], cell.accelerator)
            is_there = cell.backend in loop["backends"] and cell.precision in precisions
            yardstick = self._begin(by_hand, replace(cell, subject=loop["name"])) if is_there else None
            paired = PairedRounds(self._begin(own, cell), yardstick, rounds)
            with closing(paired):
                if benchmark.enabled:
                    benchmark.pedantic(paired.round, setup=paired.prepare, rounds=launches * rounds)
                else:  # under xdist, which pytest-benchmark does not support
                    for _ in range(launches * rounds):
                        paired.prepare()
                        paired.round()
                paired.finish_round()
            if not session.options.profile:
                return paired, None
            profile, folder = profiled(own[0], cell, session.run_on_disk.new_folder, session.options.settings)
            if profile.files:
                self._profile = str(folder)
            return paired, profile

    def _begin(self, pools: Sequence[Pool], cell: Cell) -> Begin:
        new_folder, settings = self._session.run_on_disk.new_folder, self._session.options.settings
        return lambda number: TimedLaunch.begin(pools[number % len(pools)], cell, new_folder(), settings)


def _finding(figures: Sequence[Measurement]) -> Finding:
    by_metric = {figure.metric: figure for figure in figures}
    throughput, overhead = by_metric["throughput"], by_metric.get("overhead")
    if throughput.refusal:
        return Finding(CHECK, Outcome.SKIPPED, throughput.refusal)
    message = f"{throughput.value:.4g} samples/s, 95 % interval {throughput.low:.4g} to {throughput.high:.4g}"
    if overhead is not None and overhead.value is not None:
        message += (
            f"; {overhead.value:.3g} × the time of a hand-written loop ({overhead.low:.3g} to {overhead.high:.3g})"
        )
    return Finding(CHECK, Outcome.PASSED, message)
