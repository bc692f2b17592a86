"""How a trainer of this suite is declared: what it is, and on which cells it is tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import subject
from harness.core.cell import Cell
from harness.core.outcome import Outcome
from harness.core.topology import Topology
from harness.subjects.declare import CAPABILITIES, Train


@dataclass(frozen=True)
class Expectation:
    """What the judge must say of a trainer.

    ``families`` are those that count as right for a known-bad one, and empty for a known-good one, of which
    ``outcomes`` says how its cells may end. ``cells`` are written ``workload/backend/topology/precision``.
    ``unseen`` is the reason why no check can see the mistake yet, None where one does.
    """

    families: tuple[str, ...]
    cells: tuple[str, ...]
    outcomes: tuple[Outcome, ...] = ()
    unseen: str | None = None


def known_bad(
    *families: str, on: Sequence[str], unseen: str | None = None, **declared: Any
) -> Callable[[Train], Train]:
    """Declare a trainer with a mistake in it; any of ``families`` is a right explanation.

    ``declared`` is what it says of its way of training, as in ``@subject(...)``.
    """
    return _declare(Expectation(families, tuple(on), unseen=unseen), declared)


def known_good(*, on: Sequence[str], deviates: bool = False, **declared: Any) -> Callable[[Train], Train]:
    """Declare a trainer that is right though it looks wrong: it passes, or deviates as its backend promises."""
    return _declare(Expectation((), tuple(on), (Outcome.DEVIATES if deviates else Outcome.PASSED,)), declared)


def cell_of(text: str, name: str) -> Cell:
    """Return the cell that ``workload/backend/topology/precision`` means for the trainer called ``name``."""
    workload, backend, topology, precision = text.split("/")
    nodes, gpus = map(int, topology.split("x"))
    return Cell(name, workload, backend, Topology(nodes, gpus), precision, "cpu")


def _declare(expectation: Expectation, declared: Mapping[str, Any]) -> Callable[[Train], Train]:
    cells = [cell_of(text, "") for text in expectation.cells]

    def declare(train: Train) -> Train:
        train.expectation = expectation  # type: ignore[attr-defined]
        return subject(
            name=train.__name__.replace("_", "-"),
            backends=sorted({cell.backend for cell in cells}),
            precisions=sorted({cell.precision for cell in cells}),
            capabilities=sorted(CAPABILITIES),
            **declared,
        )(train)

    return declare
