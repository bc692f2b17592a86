"""Which tensors a step computes between its blocks, where it uses them, and between which calls it cannot be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plumbline.trainer.balanced.labels import Carried, Label


@dataclass
class CarriedTensor:
    """A tensor that a step computes from what blocks return: ``last_use`` is the last place where it is used."""

    last_use: int
    differentiable: bool
    bytes: int


@dataclass
class DataFlow:
    """The tensors of a step between calls, by label, and why it cannot be cut before a place, by its number.

    ``weights`` has for each place the names of parameters and buffers that are used there, and ``uses`` for each of
    them the first and the last place; ``changes`` has where they are changed, with the place up to which each stage has
    to make the change itself, None: one stage makes it. ``drawn`` labels what operations between calls draw at random,
    ``called`` has the numbers of the calls that are made. ``labels.Position`` tells what places are.
    """

    calls: Sequence[str]
    tensors: dict[Label, CarriedTensor] = field(default_factory=dict)
    weights: list[set[str]] = field(default_factory=list)
    uses: dict[str, tuple[int, int]] = field(default_factory=dict)
    changes: dict[str, list[tuple[int, int | None]]] = field(default_factory=dict)
    drawn: set[Label] = field(default_factory=set)
    called: set[int] = field(default_factory=set)
    obstacles: dict[int, str] = field(default_factory=dict)

    def live(self, cut: int) -> tuple[Carried, ...]:
        """Return the tensors that cross the cut before place ``cut``: computed before it, and used later."""
        crossing = [label for label, one in self.tensors.items() if label.place < cut <= one.last_use and cut]
        return tuple(Carried(label, self.tensors[label].differentiable) for label in sorted(crossing))

    @property
    def end(self) -> int:
        """The number of places."""
        return 2 * len(self.calls)

    def cuts(self) -> list[int]:
        """Return the places where blocks begin: between two calls where fewest bytes cross, if the step can be cut."""
        possible = [[cut for cut in between if cut not in self.obstacles] for between in self._between_calls()]
        return [0, *(min(cuts, key=self._crossing_bytes) for cuts in possible if cuts)]

    def reasons(self) -> list[str]:
        """Return why there are no cuts between some calls."""
        missing = [cuts[0] for cuts in self._between_calls() if self.obstacles.keys() >= set(cuts)]
        return list(dict.fromkeys(self.obstacles[cut] for cut in missing))

    def _between_calls(self) -> list[tuple[int, int]]:
        """Return the places before which two calls can be parted: the second one, and the code after the first one."""
        return [(2 * call, 2 * call - 1) for call in range(1, len(self.calls))]

    def _crossing_bytes(self, cut: int) -> int:
        return sum(self.tensors[carried.label].bytes for carried in self.live(cut))

    def forbid(self, first: int, last: int, reason: str) -> None:
        """Note that the step cannot be cut after place ``first``, up to before place ``last``."""
        for cut in range(max(first + 1, 1), min(last + 1, self.end)):
            self.obstacles.setdefault(cut, reason)

    def use(self, name: str, *, here_only: bool, place: int) -> None:
        """Note that a parameter or buffer is used, at a place only or by each stage that runs the code there."""
        for weights in self.weights[place : place + 1 if here_only else None]:
            weights.add(name)
        self._extend_use(name, place, place if here_only else self.end)

    def _extend_use(self, name: str, first: int, last: int) -> None:
        known_first, known_last = self.uses.get(name, (first, last))
        self.uses[name] = (min(first, known_first), max(last, known_last))

    def agree_with(self, other: DataFlow) -> None:
        """Forbid the cuts that another step cannot have, the one of validation: it makes calls of these, no others."""
        for cut, reason in other.obstacles.items():
            self.obstacles.setdefault(cut, f"in validation, {reason}")
        self.drawn |= other.drawn
        for mine, theirs in zip(self.weights, other.weights, strict=True):
            mine |= theirs
        for name, (first, last) in other.uses.items():
            self._extend_use(name, first, last)
        for name, changes in other.changes.items():
            self.changes.setdefault(name, []).extend(changes)
        for cut in range(1, self.end - 1):
            crossing, needed = ({carried.label for carried in flow.live(cut)} for flow in (self, other))
            if cut // 2 not in other.called or not needed <= crossing <= other.tensors.keys():
                reason = f"validation_step does not compute what training_step does before {self.calls[(cut + 1) // 2]}"
                self.obstacles.setdefault(cut, reason)

    def keep_changed_together(self) -> None:
        """Forbid the cuts between where a parameter or buffer is changed and where it is used."""
        for name, changes in self.changes.items():
            first, last = self.uses[name]
            for place, until in changes:
                reason = f"{self.after(place // 2)} changes {name} in place"
                self.forbid(first, last if until is None else until, reason)

    def after(self, call: int) -> str:
        """Return what a message calls a call together with the code that follows it."""
        return f"{self.calls[call] or 'the module itself'} or the code after it" if call >= 0 else "the step's begin"
