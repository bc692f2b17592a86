"""The records of the judge's hunt, a line per training, and the page that counts them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutations import Mutation
from trainer_draws import Draw, TrainerDraw

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.workloads.generated import Recipe


@dataclass(frozen=True)
class Tried:
    """One training that was judged.

    Args:
        seed, number: identify the draw.
        mutation: the fields of the mutation, or None for a right trainer.
        accused: whether any check failed or errored, or the judge had no verdict.
        named: whether the first finding's cause is of a right family; None if the mutation has no name.
        difference: the largest difference from the unmutated training, relative to each tensor's norm; infinite if the
            samples, steps, rates or evaluations differ; None for a right trainer.
        vacuous: why the mutation is not scored: ``same bits``, ``rounding``, or ``no verdict`` if nothing is left to
            judge; None if it is scored.
        obstacle: why nothing could be judged: the problem is unsuitable, or shows nothing.
        seconds: wall time of training and judging.
    """

    seed: int
    number: int
    trainer: dict[str, Any]
    recipe: dict[str, Any]
    cell: str
    mutation: dict[str, Any] | None = None
    accused: bool = False
    named: bool | None = None
    difference: float | None = None
    vacuous: str | None = None
    obstacle: str | None = None
    seconds: float = 0.0
    check: str | None = None
    cause: str | None = None
    family: str | None = None
    message: str = ""
    x_limit: float | None = None


class Records:
    """The file with one seed's results; a run that is started again continues after its last line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        self.tried = [Tried(**json.loads(line)) for line in lines]
        # If nothing can be judged, there is no mutation either.
        self._known = {(one.number, due) for one in self.tried for due in _settled(one)}

    def has(self, number: int, *, mutated: bool) -> bool:
        """Return whether a draw was tried."""
        return (number, mutated) in self._known

    def drawn(self, number: int) -> tuple[Draw, Mutation | None] | None:
        """Return a draw that was tried, with its mutation if it had one, or None."""
        own = [one for one in self.tried if one.number == number]
        if not own:
            return None
        _, backend, topology, precision = own[0].cell.rsplit("-", 3)
        nodes, devices = map(int, topology.split("x"))
        cell = Cell("drawn", "", backend, Topology(nodes, devices), precision, "cpu")
        recipe = Recipe(**{**own[0].recipe, "layers": tuple(own[0].recipe["layers"])})
        mutations = [Mutation(**one.mutation) for one in own if one.mutation is not None]
        return Draw(TrainerDraw(**own[0].trainer), recipe, cell), next(iter(mutations), None)

    def add(self, one: Tried) -> None:
        """Append a result."""
        self.tried.append(one)
        self._known |= {(one.number, due) for due in _settled(one)}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(one)) + "\n")


def _settled(one: Tried) -> tuple[bool, ...]:
    """Return whether the draw's right trainer (False) and its mutation (True) are done."""
    return (False, True) if one.obstacle is not None else (one.mutation is not None,)


@dataclass(frozen=True)
class Counts:
    """The numbers of trainings that were judged, accused, scored, caught and named."""

    right: int
    accused: int
    mutated: int
    scored: int
    caught: int
    nameable: int
    named: int

    @classmethod
    def of(cls, tried: Iterable[Tried]) -> Counts:
        """Count the trainings that could be judged."""
        judged = [one for one in tried if one.obstacle is None]
        right = [one for one in judged if one.mutation is None]
        mutated = [one for one in judged if one.mutation is not None]
        scored = [one for one in mutated if one.vacuous is None]
        return cls(
            right=len(right),
            accused=sum(one.accused for one in right),
            mutated=len(mutated),
            scored=len(scored),
            caught=sum(one.accused for one in scored),
            nameable=sum(one.named is not None for one in scored),
            named=sum(bool(one.named) for one in scored),
        )


def accused(tried: Iterable[Tried]) -> list[Tried]:
    """Return the right trainers that were accused."""
    return [one for one in tried if one.obstacle is None and one.mutation is None and one.accused]


def escaped(tried: Iterable[Tried]) -> list[Tried]:
    """Return the mutations that were scored and not caught."""
    scored = [one for one in tried if one.obstacle is None and one.mutation is not None and one.vacuous is None]
    return [one for one in scored if not one.accused]


def by_kind(tried: Iterable[Tried]) -> list[str]:
    """Return a table of the mutations that were scored, by place and operation."""
    kinds: dict[tuple[str, str], list[Tried]] = defaultdict(list)
    for one in tried:
        if one.mutation is not None and one.obstacle is None and one.vacuous is None:
            kinds[one.mutation["place"], one.mutation["operation"]].append(one)
    lines = ["| place | operation | scored | caught | named |", "|---|---|--:|--:|--:|"]
    for (place, operation), own in sorted(kinds.items()):
        counts = Counts.of(own)
        named = counts.named if counts.nameable else "has no name"
        lines.append(f"| {place} | {operation} | {counts.scored} | {counts.caught} | {named} |")
    return lines


def summary(tried: Iterable[Tried]) -> list[str]:
    """Return the counts as Markdown lines, with all escapes and accusations in full."""
    tried = list(tried)
    counts = Counts.of(tried)
    escapes = escaped(tried)
    nothing = Counter(one.vacuous for one in tried if one.vacuous)
    obstacles = Counter(one.obstacle for one in tried if one.obstacle is not None)
    seconds = [one.seconds for one in tried if one.obstacle is None]
    lines = [
        f"- right trainers judged: {counts.right}; accused: {counts.accused}",
        f"- mutations judged: {counts.mutated}; changing nothing: {dict(nothing)}",
        f"- mutations scored: {counts.scored}; escaped: {len(escapes)} ({percent(len(escapes), counts.scored)}); "
        f"named: {counts.named} of {counts.nameable} that have a name",
        f"- not judged: {dict(obstacles)}",
        f"- seconds a training, judged: {sum(seconds) / max(len(seconds), 1):.2f}",
        "",
        *by_kind(tried),
    ]
    for title, listed in (("Right trainers that were accused", accused(tried)), ("Mutations that escaped", escapes)):
        lines += ["", f"## {title}", ""]
        lines += [f"- {_in_full(one)}" for one in listed] or ["none"]
    return lines


def in_all(tried: Iterable[Tried]) -> str:
    """Return the counts as one line."""
    counts = Counts.of(tried := list(tried))
    return (
        f"{counts.right} right trainers, {counts.accused} accused; {counts.scored} mistakes, "
        f"{counts.scored - len(escaped(tried))} caught, {counts.named} of {counts.nameable} named"
    )


def percent(part: int, whole: int) -> str:
    """Format a percentage."""
    return f"{100 * part / max(whole, 1):.1f} %"


def _in_full(one: Tried) -> str:
    found = f"{one.check}: {one.cause}: {one.message}" if one.accused else f"difference {one.difference:.2g}"
    return f"seed {one.seed}, number {one.number}, {one.cell}: {one.mutation or one.trainer} on {one.recipe}: {found}"
