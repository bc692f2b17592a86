"""What the test function of one measured cell is handed: it measures the cell through pytest-benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from harness.benchmark.launch_metrics import SamplesError
from harness.benchmark.measurements import measurements
from harness.benchmark.paired_rounds import Begin, PairedRounds
from harness.benchmark.timed_launch import TimedLaunch, TimedLaunchError
from harness.core.cell import Cell
from harness.core.errors import LaunchError, SubjectError
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.launch.pool import Pool
from harness.machine.lease import exclusive_lease
from harness.pytest_plugin.conformance_case import ConformanceCase
from harness.results.records import PERFORMANCE as CHECK
from harness.results.records import Measurement, Result
from harness.subjects.locator import parse_subject
from harness.workloads import PERFORMANCE

YARDSTICKS = "yardsticks.py"
"""The file with the hand-written loops, beside the suite's."""


class BenchmarkCase(ConformanceCase):
    """One planned cell of a session that is measured, as the test ``item``."""

    def measure(self, benchmark: Any) -> None:
        """Measure the cell by ``benchmark``, hand its figures over, and end the test as they say.

        A cell that the resumed run has already ends as it did then.
        """
        recorded = self._session.recorded(self._planned.cell)
        self._end(recorded or self._measured(benchmark), recorded=recorded is not None)

    def _measured(self, benchmark: Any) -> Sequence[Result]:
        cell, session = self._planned.cell, self._session
        reproduce = self._reproduce()
        seconds = None
        if self._planned.refusal:
            return self.declined()
        try:
            turns = self._timed(benchmark)
            seconds = sum(launch.timed.seconds for launch in turns.launches)
            self._measurements = measurements(cell, turns.launches, reproduce)
            finding = _verdict(self._measurements)
        except TimedLaunchError as failed:
            finding, self._evidence = failed.finding, str(failed.folder)
        except (LaunchError, SubjectError, SamplesError) as error:
            finding = Finding(CHECK, Outcome.ERRORED, str(error))
        benchmark.extra_info.update(_extra_info(self._measurements))
        return session.results(cell, (finding,), reproduce, seconds)

    def _timed(self, benchmark: Any) -> PairedRounds:
        """Time every round of every launch; nobody else uses the machine meanwhile."""
        cell, session = self._planned.cell, self._session
        each = PERFORMANCE[cell.workload].rounds
        rounds = session.launches * each
        benchmark.group = f"{cell.workload} {cell.precision}"
        locator = session.locator_of(cell.subject)
        session.drop_ahead()
        with exclusive_lease():
            own, by_hand = session.warm.several(locator, self._by_hand(locator), count=session.launches)
            with closing(PairedRounds(self._begins(own, cell), self._yardstick(by_hand), each)) as turns:
                if benchmark.enabled:
                    benchmark.pedantic(turns.round, setup=turns.prepare, rounds=rounds)
                else:  # under xdist, which pytest-benchmark does not go with
                    for _ in range(rounds):
                        turns.prepare()
                        turns.round()
                turns.settle()
                return turns

    def _by_hand(self, locator: str) -> str:
        """Return where the loops by hand are: they run in the interpreter of the subject, so with the same torch."""
        _, python = parse_subject(locator)
        return str(self._item.path.parent / YARDSTICKS) + (f";python={python}" if python else "")

    def _yardstick(self, pools: Sequence[Pool]) -> Begin | None:
        """Return what begins the hand-written loop of the cell's strategy, None where there is none by hand."""
        cell = self._planned.cell
        (by_hand,) = pools[0].subjects
        if cell.backend not in by_hand["backends"] or cell.precision not in by_hand["precisions"][cell.accelerator]:
            return None
        return self._begins(pools, replace(cell, subject=by_hand["name"]))

    def _begins(self, pools: Sequence[Pool], cell: Cell) -> Begin:
        session = self._session
        return lambda number: TimedLaunch.begin(
            pools[number % len(pools)], cell, session.new_folder(), session.settings
        )


def _verdict(figures: Sequence[Measurement]) -> Finding:
    """Return how a cell ended that was measured: without a throughput it might as well not have been."""
    by_metric = {figure.metric: figure for figure in figures}
    throughput, overhead = by_metric["throughput"], by_metric.get("overhead")
    if throughput.refusal:
        return Finding(CHECK, Outcome.SKIPPED, throughput.refusal)
    said = f"{throughput.value:.4g} samples/s, 95 % between {throughput.low:.4g} and {throughput.high:.4g}"
    if overhead is not None and overhead.value is not None:
        said += f"; {overhead.value:.3g} × the time by hand ({overhead.low:.3g} to {overhead.high:.3g})"
    return Finding(CHECK, Outcome.PASSED, said)


def _extra_info(figures: Sequence[Measurement]) -> dict[str, Any]:
    """Return for each metric its figure, bounds and unit; of a rank's, under its number."""
    return {
        figure.metric if figure.rank is None else f"{figure.metric} of rank {figure.rank}": figure.model_dump(
            include={"value", "low", "high", "unit", "refusal"}, exclude_none=True
        )
        for figure in figures
    }
