"""How a trainer of this suite is declared: what it is, and on which cells it is tried."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plumbline import subject
from plumbline.core.cell import Cell
from plumbline.core.finding import UNEXPLAINED, Finding, diagnosis
from plumbline.core.outcome import Outcome, worst
from plumbline.core.topology import Topology
from plumbline.subjects.declare import CAPABILITIES, Train

Trainer = Callable[..., Any]
"""A function of a job, or a class whose objects are made of a job and train in ``fit``."""


@dataclass(frozen=True)
class Expectation:
    """The expected verdict on a trainer.

    ``families`` are those that count as right for a known-bad one; it has none if it is none of the mistakes that are
    known by name, and may stay unexplained. ``causes`` are the names that count as right. ``outcomes`` says how the
    cells of a known-good one may end. ``cells`` are written ``workload/backend/topology/precision``, each with the name
    of a check that must fail there, or None.
    ``vacuous``: that check has no verdict, because nothing moves. ``unseen`` is the reason why no check can see the
    mistake yet, None where one does.
    """

    families: tuple[str, ...]
    cells: Mapping[str, str | None]
    causes: tuple[str, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    unseen: str | None = None
    vacuous: bool = False

    @property
    def good(self) -> bool:
        """Whether the trainer is right."""
        return bool(self.outcomes)

    def named(self, findings: Sequence[Finding]) -> bool:
        """Return whether the diagnosis of ``findings`` is of one of the families that are expected."""
        found = diagnosis(findings)
        return found is not None and found.cause not in (None, UNEXPLAINED) and found.family in self.families

    def caused(self, findings: Sequence[Finding]) -> bool:
        """Return whether the diagnosis of ``findings`` names one of the causes that are expected."""
        return self.named(findings) and getattr(diagnosis(findings), "cause", None) in self.causes

    def mismatch(self, findings: Sequence[Finding], check: str | None) -> str | None:
        """Return how ``findings`` differ from what is expected on a cell with that ``check``; None if they do not."""
        outcome = worst(finding.outcome for finding in findings)
        bad = [finding for finding in findings if finding.outcome.is_bad]
        if self.good:
            found = None if outcome in self.outcomes else f"the outcome is {outcome.value}"
        elif not outcome.is_bad:
            found = "it escapes"
        elif check and {f.check: f.outcome for f in bad}.get(check) is not self._outcome_of_check:
            found = f"{check} does not see it"
        elif self.families and not self.named(findings):
            found = f"its diagnosis is not of {self.families}"
        else:
            found = None
        lines = [f"{f.check}: {f.outcome.value} ({f.family}, {f.cause}): {f.message}" for f in bad or findings]
        return found and "\n".join([found, *lines])

    @property
    def _outcome_of_check(self) -> Outcome:
        return Outcome.ERRORED if self.vacuous else Outcome.FAILED


def known_bad(
    *families: str,
    on: Sequence[str] | Mapping[str, str | None],
    causes: Sequence[str] = (),
    unseen: str | None = None,
    vacuous: bool = False,
    **declared: Any,
) -> Callable[[Trainer], Train]:
    """Declare a trainer with a mistake in it; any of ``families`` is a right explanation, or none if there are none.

    ``causes`` are the names of a right explanation. ``on`` is its cells, or its cells with the check that must fail on
    each. ``declared`` is what the trainer says of its way of training, as in ``@subject(...)``.
    """
    return _declare(Expectation(families, _cells(on), tuple(causes), unseen=unseen, vacuous=vacuous), declared)


def known_good(*, on: Sequence[str], deviates: bool = False, **declared: Any) -> Callable[[Trainer], Train]:
    """Declare a trainer that is right though it looks wrong: it passes, or deviates as its backend promises."""
    return _declare(Expectation((), _cells(on), outcomes=(Outcome.DEVIATES if deviates else Outcome.PASSED,)), declared)


def failing(check: str, *places: str, precisions: Sequence[str] = ("32", "64")) -> dict[str, str | None]:
    """Return cells on which ``check`` must fail: ``workload/backend/topology`` in each of ``precisions``."""
    return {f"{place}/{precision}": check for place in places for precision in precisions}


def any_check(*cells: str) -> dict[str, str | None]:
    """Return cells on which any check may fail, to be joined with those of ``failing``."""
    return dict.fromkeys(cells)


def cell_of(text: str, name: str) -> Cell:
    """Return the cell that ``workload/backend/topology/precision`` means for the trainer called ``name``."""
    workload, backend, topology, precision = text.split("/")
    nodes, gpus = map(int, topology.split("x"))
    return Cell(name, workload, backend, Topology(nodes, gpus), precision, "cpu")


def _cells(on: Sequence[str] | Mapping[str, str | None]) -> Mapping[str, str | None]:
    return on if isinstance(on, Mapping) else dict.fromkeys(on)


def _declare(expectation: Expectation, declared: Mapping[str, Any]) -> Callable[[Trainer], Train]:
    cells = [cell_of(text, "") for text in expectation.cells]

    def declare(trainer: Trainer) -> Train:
        if isinstance(trainer, type):
            name, train = re.sub(r"\B([A-Z])", r"-\1", trainer.__name__).lower(), lambda job: trainer(job).fit()
        else:
            name, train = trainer.__name__.replace("_", "-"), trainer
        train.expectation = expectation  # type: ignore[attr-defined]
        return subject(
            name=name,
            backends=sorted({cell.backend for cell in cells}),
            precisions=sorted({cell.precision for cell in cells}),
            capabilities=sorted(CAPABILITIES),
            **declared,
        )(train)

    return declare
