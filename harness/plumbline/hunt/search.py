"""Draws problems (recipes that a subject can train), trains and judges them, and shrinks those that fail."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from plumbline.core.backend import declared_for
from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError, WorkloadError
from plumbline.core.finding import UNEXPLAINED, VACUOUS, Finding
from plumbline.core.invocation import suites
from plumbline.core.outcome import Outcome
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings
from plumbline.launch.pool import Pool
from plumbline.own_workloads.check import refuse_unfit
from plumbline.own_workloads.load import workload_of
from plumbline.planning.declaration import Declaration
from plumbline.planning.devices import resolve_accelerator
from plumbline.planning.expectation_files import known_of_subject, read_expectations
from plumbline.planning.plan import SMOKE_WORKLOADS, Matrix, plan
from plumbline.workloads import WORKLOADS
from plumbline.workloads.generated import INPUTS, LABELS, LAYERS, LOSSES, OPTIMIZERS, RETURNS, SCHEDULES, TEXT, Recipe

MOST_LAYERS = 5
WIDTHS = (1, 3, 5, 8)
ASKS = {
    "several": ("several-optimizers",),
    "muon": ("matrix-optimizer", "several-optimizers"),
    "unused": ("unused-parameters",),
    "thawed": ("unused-parameters",),
    "frozen": ("frozen-parameters",),
    "adapter": ("frozen-parameters",),
    "sparse-tokens": ("sparse-gradients",),
    "nested": ("nested-outputs",),
}
"""The capabilities that words of a recipe need."""

OVER_SAMPLES = ("classes", "squares", "two")
"""Losses that are means over samples. The epoch mean of other losses depends on how it is divided into batches."""


@dataclass(frozen=True)
class Drawn:
    """A recipe, and the cell that trains it. The cell's workload is a placeholder."""

    recipe: Recipe
    cell: Cell


@st.composite
def problems(draw: st.DrawFn, declared: Sequence[Declaration], cells: Sequence[Cell]) -> Drawn:
    """Draw one of ``cells`` and a recipe that needs nothing beyond what is declared for its backend."""
    cell = draw(st.sampled_from(list(cells)))
    subject = declared_for(cell.subject, cell.backend, declared)
    behavior = subject.behavior
    recipe = draw(recipes(subject.capabilities, own_loss=behavior.own_loss, adapters_only=behavior.adapters_only))
    if behavior.by_iterations:  # nothing may depend on where an epoch ends
        recipe = replace(recipe, shuffle=True, left_out=0, accumulate=min(recipe.accumulate, recipe.steps_per_epoch))
    if "batchnorm" in recipe.layers:  # it raises if a device has one sample
        least = 2 * cell.topology.devices * cell.parallelism.micro_batches
        recipe = replace(recipe, batch_size=max(recipe.batch_size, least), left_out=0)
    if cell.parallelism.micro_batches > 1:
        # Every batch, the last one included, must divide into the micro-batches of a pipeline's replicas.
        pieces = len(cell.parallelism.replicas(cell.topology)) * cell.parallelism.micro_batches
        multiple = math.lcm(pieces, cell.topology.devices)
        batch_size = -(-recipe.batch_size // multiple) * multiple
        whole = recipe.left_out // multiple * multiple
        left_out = 0 if behavior.needs_equal_batches else min(whole, batch_size - multiple)
        recipe = replace(recipe, batch_size=batch_size, left_out=left_out)
    if recipe.accumulate > 1 and recipe.loss not in OVER_SAMPLES:
        # Micro-batches of different sizes may have equal weights, or weights by size. Either is right.
        recipe = replace(recipe, left_out=0)
    return Drawn(recipe, cell)


@st.composite
def recipes(
    draw: st.DrawFn, capabilities: frozenset[str], *, own_loss: bool = False, adapters_only: bool = False
) -> Recipe:
    """Draw a recipe, which shrinks to a linear layer.

    A trainer with an ``own_loss`` gets only texts with labels, one with ``adapters_only`` only models with adapters.
    """
    inputs = TEXT if own_loss else draw(st.sampled_from(_allowed(INPUTS, capabilities)))
    sparse = inputs == "sparse-tokens"
    tokens = inputs in ("tokens", "sparse-tokens")
    losses = [LABELS] if own_loss else [one for one in LOSSES if tokens or one != "token-mean"]
    loss = draw(st.sampled_from(losses))
    optimizer = draw(st.sampled_from(["sgd"] if sparse else _allowed(OPTIMIZERS, capabilities)))
    layers = (*draw(st.lists(_layers(capabilities, own_loss), max_size=MOST_LAYERS)), *["adapter"] * adapters_only)
    if "adapter" in layers:  # All other layers are frozen, so nothing can be thawed, and nothing left unused.
        layers = tuple(word for word in layers if word not in ("thawed", "unused"))
    recipe = Recipe(
        inputs=inputs,
        layers=layers,
        loss=loss,
        optimizer=optimizer,
        schedule=draw(st.sampled_from(SCHEDULES)) if "scheduler" in capabilities else "none",
        batch_size=draw(st.integers(1, 24)),
        steps_per_epoch=draw(st.integers(1, 4)),
        epochs=draw(st.integers(1, 2)),
        left_out=draw(st.integers(0, 12)),
        accumulate=draw(st.integers(1, 3)) if "accumulation" in capabilities else 1,
        clip_norm=draw(st.sampled_from([None, 0.05, 1.0, 100.0]))
        if "clipping" in capabilities and not sparse
        else None,
        validate_every=draw(st.sampled_from([None, 1, 2])) if "validation" in capabilities else None,
        metrics=draw(st.booleans()) if "metrics" in capabilities and loss in OVER_SAMPLES else False,
        returns=draw(st.sampled_from(_allowed(RETURNS, capabilities))),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )
    if (recipe.validate_every or 0) > recipe.steps_per_epoch:  # nothing would be due, and Lightning refuses it
        recipe = replace(recipe, validate_every=None)
    if "checkpoint" not in capabilities or recipe.steps == 1:
        return recipe
    return replace(recipe, interrupt_after=draw(st.sampled_from([None, *range(1, recipe.steps)])))


def _layers(capabilities: frozenset[str], own_loss: bool) -> st.SearchStrategy[str]:
    # A trainer with its own loss gets no batch statistics: each rank has its own, and a loss over the labels of all
    # ranks is then neither what one device computes nor a mean over ranks.
    words = []
    for kind in _allowed((kind for kind in LAYERS if not (own_loss and kind == "batchnorm")), capabilities):
        words += [f"linear-{width}" for width in WIDTHS] if kind == "linear" else [kind]
    return st.sampled_from(words)


def _allowed(words: Iterable[str], capabilities: frozenset[str]) -> list[str]:
    return [word for word in words if capabilities.issuperset(ASKS.get(word, ()))]


_FILE = '''"""A problem that `plumbline hunt` drew{found}. Train it: pytest suites/ --workload {name}.py"""

from plumbline.workloads.generated import Generated, Recipe


class Problem(Generated):
    name = "{name}"
    recipe = {recipe}
'''


def name_of(recipe: Recipe) -> str:
    return f"drawn-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:8]}"


def write_problem(recipe: Recipe, folder: Path, found: str = "") -> str:
    """Write the recipe's file, and return the locator of its workload. ``found`` ends its first sentence."""
    name = name_of(recipe)
    file = folder / f"{name}.py"
    file.write_text(_FILE.format(found=found, name=name, recipe=in_words(recipe)), "utf-8")
    return f"{file.resolve()}::{name}"


def in_words(recipe: Recipe) -> str:
    """Return the recipe as Python code, without the fields that have their defaults."""
    plain = Recipe()
    given = [
        f"{field.name}={getattr(recipe, field.name)!r}"
        for field in fields(recipe)
        if getattr(recipe, field.name) != getattr(plain, field.name)
    ]
    return f"Recipe({', '.join(given)})"


def trained_on(cell: Cell, recipe: Recipe, locator: str) -> Cell:
    return replace(cell, workload=name_of(recipe), workload_locator=locator)


DRAWN_TOGETHER = 200  # problems that one round of the search draws
TIME_LIMIT = 60.0  # default limit of one training in seconds
SHRINKING = 120.0  # seconds for which the last failure is still shrunk after the search's time is over
NEVER_STEPPED = "never-stepped"


@dataclass(frozen=True)
class Failure:
    """A problem on which the subject is wrong, and its first finding. The others may follow from it."""

    drawn: Drawn
    finding: Finding

    @property
    def cause(self) -> str:
        """The check and the cause. If both are the same, two failures count as one."""
        return f"{self.finding.check}: {self.finding.cause or UNEXPLAINED}"


class _FoundError(Exception):
    """A problem fails: hypothesis shrinks it."""


@dataclass
class Search:
    """A search among the problems of one subject, on ``cells``, whose workload is a placeholder.

    ``folder`` is for temporary problems and traces, ``time_limit`` is for one training, in seconds. Causes that are
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
ADAPTERS = ("adapter",)  # the workload that is planned for subjects that train only adapters


def searches(
    pool: Pool, declared: Sequence[Declaration], gpus: int, scratch: Path, time_limit: float = TIME_LIMIT
) -> list[Search]:
    """Return a search for each declared subject, on cells of up to ``gpus`` devices; raise ``PlanError`` if none."""
    accelerator = resolve_accelerator("auto")[0]
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
    """Return the subject's cells of the first workload that has any, few devices and float32 first."""
    behavior = declared[0].behavior
    for plain in TEXTS if behavior.own_loss else ADAPTERS if behavior.adapters_only else SMOKE_WORKLOADS:
        planned = plan(Matrix(gpus=gpus, workloads=(plain,), accelerator=accelerator), declared, WORKLOADS)
        cells = [one.cell for one in planned if one.refusal is None]
        if cells:
            return sorted(cells, key=lambda cell: (cell.topology.devices, cell.precision != "32"))
    return []
