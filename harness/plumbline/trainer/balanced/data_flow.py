"""The data flow of a step: tensors that pass between its blocks, where they are used, and where it cannot be cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Label(NamedTuple):
    """Identifies a tensor: output number ``output`` of an operation after module call number ``call``.

    If ``operation`` is empty, it is an output of the call itself. Call -1 is the start of the step.
    """

    call: int
    operation: str
    output: int

    @property
    def place(self) -> int:
        return 2 * self.call + bool(self.operation)


class Position:
    """The current position in a step: within or after module call number ``call``, and the latest operation.

    Places are numbered: call c is place 2c, the code after it place 2c + 1, and the code before all calls place -1.
    """

    def __init__(self) -> None:
        self.call, self.operation = -1, ""
        self.inside = False
        self._counts: Counter[str] = Counter()

    def enter(self, call: int) -> None:
        self.call, self.operation, self.inside = call, "", True
        self._counts.clear()

    def leave(self) -> None:
        self.inside = False

    @property
    def place(self) -> int:
        return 2 * self.call + (not self.inside)

    def pass_operation(self, func: Any) -> None:
        """Record an operation. Operations of each name are numbered separately, so that others can come and go."""
        name = getattr(func, "__name__", type(func).__name__)
        self._counts[name] += 1
        self.operation = f"{name} {self._counts[name]}"

    def label(self, output: int) -> Label:
        return Label(self.call, self.operation, output)


@dataclass(frozen=True)
class Carried:
    """A tensor that crosses a cut. If it is ``differentiable``, its gradient is sent back."""

    label: Label
    differentiable: bool


@dataclass(frozen=True)
class Part:
    """Places ``first`` to ``last - 1`` of a step, with the tensors received before them and sent after them."""

    first: int
    last: int
    arriving: tuple[Carried, ...] = ()
    departing: tuple[Carried, ...] = ()


@dataclass
class CarriedTensor:
    """A tensor of a step that has a label. ``last_use`` is the last place that uses it."""

    last_use: int
    differentiable: bool
    bytes: int


@dataclass
class DataFlow:
    """The labelled tensors of a step, and ``obstacles``: the places before which it cannot be cut, with the reasons.

    ``Position`` explains places. ``weights`` has the names of the parameters and buffers used at each place, ``uses``
    the first and last place of each. ``changes`` has the places where each is changed, with the place up to which no
    cut is allowed after its first use (None: its last use). ``drawn`` has the labels of tensors that operations between
    calls draw at random, ``called`` the numbers of the calls that are made.
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
        """Return the tensors that cross the cut before place ``cut``: computed before it, and used at or after it."""
        crossing = [label for label, one in self.tensors.items() if label.place < cut <= one.last_use and cut]
        return tuple(Carried(label, self.tensors[label].differentiable) for label in sorted(crossing))

    @property
    def end(self) -> int:
        return 2 * len(self.calls)

    def cuts(self) -> list[int]:
        """Return the places where blocks begin: between two calls, the possible cut that the fewest bytes cross."""
        possible = [[cut for cut in between if cut not in self.obstacles] for between in self._between_calls()]
        return [0, *(min(cuts, key=self._crossing_bytes) for cuts in possible if cuts)]

    def reasons(self) -> list[str]:
        missing = [cuts[0] for cuts in self._between_calls() if self.obstacles.keys() >= set(cuts)]
        return list(dict.fromkeys(self.obstacles[cut] for cut in missing))

    def _between_calls(self) -> list[tuple[int, int]]:
        return [(2 * call, 2 * call - 1) for call in range(1, len(self.calls))]

    def _crossing_bytes(self, cut: int) -> int:
        return sum(self.tensors[carried.label].bytes for carried in self.live(cut))

    def forbid(self, first: int, last: int, reason: str) -> None:
        for cut in range(max(first + 1, 1), min(last + 1, self.end)):
            self.obstacles.setdefault(cut, reason)

    def use(self, name: str, *, here_only: bool, place: int) -> None:
        """Record the use of a parameter or buffer, at this place only, or on every stage that runs this code."""
        for weights in self.weights[place : place + 1 if here_only else None]:
            weights.add(name)
        self._extend_use(name, place, place if here_only else self.end)

    def _extend_use(self, name: str, first: int, last: int) -> None:
        known_first, known_last = self.uses.get(name, (first, last))
        self.uses[name] = (min(first, known_first), max(last, known_last))

    def agree_with(self, other: DataFlow) -> None:
        """Forbid the cuts that validation does not allow. It can make fewer calls, but no others."""
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
        for name, changes in self.changes.items():
            first, last = self.uses[name]
            for place, until in changes:
                reason = f"{self.after(place // 2)} changes {name} in place"
                self.forbid(first, last if until is None else until, reason)

    def after(self, call: int) -> str:
        if call < 0:
            return "the start of the step"
        return f"{self.calls[call] or 'the module itself'} or the code after it"
