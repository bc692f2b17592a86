"""Draws problems for a subject, trains and judges them, and shrinks a failure to the simplest with the same cause."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from plumbline.core.accelerator import resolve_accelerator
from plumbline.core.backend import declared_for
from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError, WorkloadError
from plumbline.core.finding import UNEXPLAINED, Finding
from plumbline.core.invocation import suites
from plumbline.core.outcome import Outcome
from plumbline.engine.examine import examine
from plumbline.hunt.problems import Drawn, problems, trained_on, write_problem
from plumbline.launch.pool import Pool
from plumbline.launch.settings import Settings
from plumbline.own_workloads.check import refuse_unfit
from plumbline.own_workloads.load import workload_of
from plumbline.planning.declaration import Declaration
from plumbline.planning.expectation_files import read_expectations
from plumbline.planning.expectations import known_of_subject
from plumbline.planning.plan import SMOKE_WORKLOADS, Matrix, plan
from plumbline.workloads import WORKLOADS

DRAWN_TOGETHER = 200  # problems that one round of the search draws
TIME_LIMIT = 60.0  # default limit of one training in seconds
SHRINKING = 120.0  # seconds for which the last failure is still shrunk after the search's time is over
VACUOUS, NEVER_STEPPED = "vacuous", "never-stepped"


@dataclass(frozen=True)
class Failure:
    """A problem on which the subject is wrong, and its first finding. The others may follow from it."""

    drawn: Drawn
    finding: Finding

    @property
    def cause(self) -> str:
        """The check and the cause. Failures with the same ones are the same failure."""
        return f"{self.finding.check}: {self.finding.cause or UNEXPLAINED}"


class _FoundError(Exception):
    """A problem fails: hypothesis shrinks it."""


@dataclass
class Search:
    """A search among the problems of one subject, on ``cells``, whose workload is a placeholder.

    ``folder`` is for temporary problems and traces, ``time_limit`` is that of one training in seconds. Causes that are
    ``known`` are skipped; new ones are added. ``counts`` has problems that were ``drawn``, ``unfit`` for judging,
    ``refused`` by the subject, ``trained``, ``failed``, or passed with a ``vacuous`` check; new ``causes``; ``rounds``;
    ``seconds``; failures by cause.
    """

    pool: Pool
    declared: Sequence[Declaration]
    cells: Sequence[Cell]
    folder: Path
    time_limit: float = TIME_LIMIT
    known: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    _answers: dict[Drawn, Failure | None] = field(default_factory=dict)
    _chased: Failure | None = None
    until: float = 0.0

    def run(self, seconds: float, first_seed: int, tell: Callable[[Failure], None]) -> None:
        """Search for ``seconds``, and call ``tell`` with each new failure when it is shrunk."""
        began = time.monotonic()
        self.until = began + seconds
        while time.monotonic() < self.until:
            failure = self.round(first_seed + self.counts["rounds"])
            self.counts["rounds"] += 1
            if failure is not None:
                self.known.add(failure.cause)
                self.counts["causes"] += 1
                tell(failure)
        self.counts["seconds"] += round(time.monotonic() - began)

    def round(self, number: int) -> Failure | None:
        """Draw problems until one fails with a new cause, and return it shrunk."""
        self._chased = None

        @seed(number)
        @settings(
            max_examples=DRAWN_TOGETHER, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False, print_blob=False,
        )  # fmt: skip
        @given(problems(self.declared, self.cells))
        def nothing_fails(drawn: Drawn) -> None:
            failure = self.answer(drawn)
            if failure is None or failure.cause in self.known:
                return
            if self._chased is None or self._chased.cause == failure.cause:
                self._chased = failure
                raise _FoundError

        with suppress(_FoundError, Flaky):
            nothing_fails()
        return self._chased

    def answer(self, drawn: Drawn) -> Failure | None:
        """Train and judge a problem once. After the time is over, new problems are trained only to shrink a failure."""
        if drawn not in self._answers:
            if time.monotonic() > self.until + (SHRINKING if self._chased else 0):
                return None
            self._answers[drawn] = self.train(drawn)
        return self._answers[drawn]

    def train(self, drawn: Drawn) -> Failure | None:
        """Train and judge a problem; return None if it passes, or if no trainer could be judged by it."""
        self.counts["drawn"] += 1
        cell = trained_on(drawn.cell, drawn.recipe, write_problem(drawn.recipe, self.folder))
        try:
            workload = workload_of(cell)
            refuse_unfit(workload, [cell.topology.devices])
            refused = declared_for(cell.subject, cell.backend, self.declared).refusal(cell)
        except WorkloadError:
            self.counts["unfit"] += 1
            return None
        finally:
            WORKLOADS.pop(cell.workload, None)
        if refused is not None:
            self.counts["refused"] += 1
            return None
        trace = self.folder / "trace"
        try:
            findings = examine(self.pool, cell, trace, Settings(time_limit=self.time_limit)).findings
        finally:
            shutil.rmtree(trace, ignore_errors=True)
            WORKLOADS.pop(cell.workload, None)
        self.counts["trained"] += 1
        # A trainer that never steps makes checks vacuous too, and is wrong.
        vacuous = [
            one
            for one in findings
            if one.outcome is Outcome.ERRORED and one.message.startswith(VACUOUS) and one.cause != NEVER_STEPPED
        ]
        telling = [one for one in findings if one not in vacuous]
        bad = [one for one in telling if one.outcome.is_bad]
        if bad:
            failure = Failure(drawn, bad[0])
            self.counts.update(["failed", failure.cause])
            return failure
        self.counts["vacuous"] += len(telling) < len(findings)
        return None


TEXTS = ("lm-tokens",)  # the workload that is planned for subjects with a loss of their own


def searches(
    pool: Pool, declared: Sequence[Declaration], gpus: int, scratch: Path, time_limit: float = TIME_LIMIT
) -> list[Search]:
    """Return a search for each declared subject, on cells of up to ``gpus`` devices; ``PlanError``: it has none."""
    accelerator = resolve_accelerator("auto", torch.cuda.device_count())
    expectations = read_expectations(suites() / "expectations")
    found = []
    for name in dict.fromkeys(one.name for one in declared):
        own = [one for one in declared if one.name == name]
        cells = cells_of(own, gpus, accelerator)
        if not cells:
            raise PlanError(f"{name} has no cell of up to {gpus} devices: raise --gpus")
        known = [one.entry for one in known_of_subject(name, own[0].software, expectations)]
        causes = {
            f"{check}: {cause}"
            for one in known
            for check in (*one.check, *one.consequences)
            for cause in one.cause or ()
        }
        found.append(Search(pool, own, cells, scratch, time_limit, known=causes))
    return found


def cells_of(declared: Sequence[Declaration], gpus: int, accelerator: str) -> list[Cell]:
    """Return the subject's cells, those with few devices and float32 first.

    They belong to the first workload that has any: a pipeline of many stages needs a model of many blocks.
    """
    for plain in TEXTS if declared[0].behavior.own_loss else SMOKE_WORKLOADS:
        planned = plan(Matrix(gpus=gpus, workloads=(plain,), accelerator=accelerator), declared, WORKLOADS)
        cells = [one.cell for one in planned if one.refusal is None]
        if cells:
            return sorted(cells, key=lambda cell: (cell.topology.devices, cell.precision != "32"))
    return []
