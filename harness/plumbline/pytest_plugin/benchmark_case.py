"""The test of a measured cell, timed by pytest-benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from plumbline.benchmark.launch_metrics import SamplesError
from plumbline.benchmark.measurements import measurements, not_applicable
from plumbline.benchmark.paired_rounds import Begin, PairedRounds
from plumbline.benchmark.timed_launch import TimedLaunch, TimedLaunchError, profiled
from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, SubjectError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.launch.pool import Pool
from plumbline.machine.fingerprint import device_name
from plumbline.machine.lease import exclusive_lease
from plumbline.pytest_plugin.conformance_case import ConformanceCase
from plumbline.results.records import PERFORMANCE as CHECK
from plumbline.results.records import Measurement, Profile, Result
from plumbline.subjects.load import parse_subject
from plumbline.workloads import PERFORMANCE

YARDSTICKS = "yardsticks.py"
"""The file of the hand-written loops, in the suite's folder."""


class BenchmarkCase(ConformanceCase):
    """A planned cell that is measured, as the test ``item``."""

    def measure(self, benchmark: Any) -> None:
        recorded = self._session.recording.known(self._planned.cell)
        self._end(recorded or self._measure(benchmark), recorded=recorded is not None)

    def _measure(self, benchmark: Any) -> Sequence[Result]:
        if self._planned.refusal:
            return self.declined()
        cell, seconds = self._planned.cell, None
        further: dict[str, Any] = {}
        try:
            rounds, profile = self._time(benchmark)
            seconds = sum(launch.timed.seconds for launch in rounds.launches)
            device = device_name(cell.accelerator)
            self._measurements = measurements(cell, rounds.launches, self._reproduce(), device)
            further = {"profile": profile, "not_applicable": not_applicable(cell, rounds.launches, device)}
            finding = _finding(self._measurements)
        except TimedLaunchError as failed:
            finding, self._evidence = failed.finding, str(failed.folder)
        except (LaunchError, SubjectError, SamplesError) as error:
            finding = Finding(CHECK, Outcome.ERRORED, str(error))
        benchmark.extra_info.update(_extra_info(self._measurements))
        (result,) = self._results((finding,), seconds)
        return [result.model_copy(update=further)]

    def _time(self, benchmark: Any) -> tuple[PairedRounds, Profile | None]:
        cell, session = self._planned.cell, self._session
        launches, rounds = session.options.launches, PERFORMANCE[cell.workload].rounds
        benchmark.group = f"{cell.workload} {cell.precision}"
        locator = session.pools.locator_of(cell.subject)
        session.cells_in_flight.discard()
        with exclusive_lease():
            own, by_hand = session.pools.for_measuring.several(locator, self._yardstick(locator), count=launches)
            paired = PairedRounds(self._begin(own, cell), self._begin_yardstick(by_hand), rounds)
            with closing(paired):
                if benchmark.enabled:
                    benchmark.pedantic(paired.round, setup=paired.prepare, rounds=launches * rounds)
                else:  # under xdist, which pytest-benchmark does not support
                    for _ in range(launches * rounds):
                        paired.prepare()
                        paired.round()
                paired.finish_round()
            return paired, self._profiled(own[0]) if session.options.profile else None

    def _profiled(self, pool: Pool) -> Profile:
        cell, session = self._planned.cell, self._session
        profile, folder = profiled(pool, cell, session.recording.new_folder, session.options.settings)
        if profile.files:
            self._profile = str(folder)
        return profile

    def _yardstick(self, locator: str) -> str:
        # In the subject's interpreter, so that both use the same torch.
        _, python = parse_subject(locator)
        return str(self._item.path.parent / YARDSTICKS) + (f";python={python}" if python else "")

    def _begin_yardstick(self, pools: Sequence[Pool]) -> Begin | None:
        cell = self._planned.cell
        (yardstick,) = pools[0].subjects
        if cell.backend not in yardstick["backends"] or cell.precision not in yardstick["precisions"][cell.accelerator]:
            return None
        return self._begin(pools, replace(cell, subject=yardstick["name"]))

    def _begin(self, pools: Sequence[Pool], cell: Cell) -> Begin:
        new_folder, settings = self._session.recording.new_folder, self._session.options.settings
        return lambda number: TimedLaunch.begin(pools[number % len(pools)], cell, new_folder(), settings)


def _finding(figures: Sequence[Measurement]) -> Finding:
    by_metric = {figure.metric: figure for figure in figures}
    throughput, overhead = by_metric["throughput"], by_metric.get("overhead")
    if throughput.refusal:
        return Finding(CHECK, Outcome.SKIPPED, throughput.refusal)
    message = f"{throughput.value:.4g} samples/s, 95 % between {throughput.low:.4g} and {throughput.high:.4g}"
    if overhead is not None and overhead.value is not None:
        message += f"; {overhead.value:.3g} × the time by hand ({overhead.low:.3g} to {overhead.high:.3g})"
    return Finding(CHECK, Outcome.PASSED, message)


def _extra_info(figures: Sequence[Measurement]) -> dict[str, Any]:
    return {
        figure.metric if figure.rank is None else f"{figure.metric} of rank {figure.rank}": figure.model_dump(
            include={"value", "low", "high", "unit", "refusal"}, exclude_none=True
        )
        for figure in figures
    }
