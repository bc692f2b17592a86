"""Decorators that declare a trainer as known-bad or known-good, on given cells."""

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
"""A function that takes a job, or a class that is constructed with a job and trains in ``fit``."""


@dataclass(frozen=True)
class Expectation:
    """The expected verdict on a trainer.

    ``families`` are the families that count as right for a known-bad trainer. It is empty if the mistake has no name
    and may stay unexplained. ``causes`` are the causes that count as right. ``outcomes`` are the outcomes that the
    cells of a known-good trainer may have. ``cells`` maps ``workload/backend/topology/precision`` to the check that
    must fail there, or to None if any check may.

    ``vacuous``: that check must be ``ERRORED`` instead of failing, because nothing moves. ``unseen`` says why no check
    can see the mistake yet, or is None if one does.
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
        """Return whether the diagnosis of ``findings`` belongs to an expected family."""
        found = diagnosis(findings)
        return found is not None and found.cause not in (None, UNEXPLAINED) and found.family in self.families

    def caused(self, findings: Sequence[Finding]) -> bool:
        """Return whether the diagnosis of ``findings`` names an expected cause."""
        return self.named(findings) and getattr(diagnosis(findings), "cause", None) in self.causes

    def mismatch(self, findings: Sequence[Finding], check: str | None) -> str | None:
        """Return how ``findings`` differ from what is expected on a cell with this ``check``; None if they do not."""
        outcome = worst(finding.outcome for finding in findings)
        bad = [finding for finding in findings if finding.outcome.is_bad]
        if self.good:
            found = None if outcome in self.outcomes else f"the outcome is {outcome.value}"
        elif not outcome.is_bad:
            found = "no check failed"
        elif check and {f.check: f.outcome for f in bad}.get(check) is not self._outcome_of_check:
            found = f"{check} did not fail as expected"
        elif self.families and not self.named(findings):
            found = f"the diagnosis is of none of the families {self.families}"
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
    """Declare a trainer with a mistake. The diagnosis must be of one of ``families``, if there are any.

    ``causes`` are the causes that count as right. ``on`` lists the cells, or maps each cell to the check that must fail
    there. ``declared`` is passed to ``@subject(...)``.
    """
    return _declare(Expectation(families, _cells(on), tuple(causes), unseen=unseen, vacuous=vacuous), declared)


def known_good(*, on: Sequence[str], deviates: bool = False, **declared: Any) -> Callable[[Trainer], Train]:
    """Declare a right trainer that looks wrong. It must pass, or with ``deviates`` deviate as its backend documents."""
    return _declare(Expectation((), _cells(on), outcomes=(Outcome.DEVIATES if deviates else Outcome.PASSED,)), declared)


def failing(check: str, *places: str, precisions: Sequence[str] = ("32", "64")) -> dict[str, str | None]:
    """Return cells on which ``check`` must fail: ``workload/backend/topology`` in each of ``precisions``."""
    return {f"{place}/{precision}": check for place in places for precision in precisions}


def any_check(*cells: str) -> dict[str, str | None]:
    """Return cells on which any check may fail; merge them with the result of ``failing``."""
    return dict.fromkeys(cells)


def cell_of(text: str, name: str) -> Cell:
    """Parse ``workload/backend/topology/precision`` into a cell of the trainer called ``name``."""
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
