"""Labels of the tensors that a step computes between its blocks. All stages run the same code and so agree on them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple


class Label(NamedTuple):
    """Output ``output`` of an operation that follows call ``call``, or of the call itself if ``operation`` is empty.

    Call -1 is the start of the step.
    """

    call: int
    operation: str
    output: int

    @property
    def place(self) -> int:
        return 2 * self.call + bool(self.operation)


class Position:
    """The current position in a step: inside call ``call`` or after it, and at which operation.

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
        """Record an operation. Operations are numbered by name, so that others may be added or left out."""
        name = getattr(func, "__name__", type(func).__name__)
        self._counts[name] += 1
        self.operation = f"{name} {self._counts[name]}"

    def label(self, output: int) -> Label:
        """Return the label of an output of the last recorded operation or call."""
        return Label(self.call, self.operation, output)


@dataclass(frozen=True)
class Carried:
    """A tensor that crosses a cut; if it is ``differentiable``, its gradient comes back."""

    label: Label
    differentiable: bool


@dataclass(frozen=True)
class Part:
    """Places ``first`` to ``last - 1`` of a step, with the tensors that arrive before them and depart after them."""

    first: int
    last: int
    arriving: tuple[Carried, ...] = ()
    departing: tuple[Carried, ...] = ()
