"""Names of the tensors that a step computes between its blocks: equal on all stages, which run the same code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple


class Label(NamedTuple):
    """Output number ``output`` of an operation that follows call number ``call``, or of that call, ``operation`` "".

    Call -1 stands for the begin of the step.
    """

    call: int
    operation: str
    output: int

    @property
    def place(self) -> int:
        """The place where it is computed, see ``Position``."""
        return 2 * self.call + bool(self.operation)


class Position:
    """Where a step is: in call number ``call`` or after it, and at which operation.

    Places are numbered: call c is place 2c, the code that follows it 2c + 1, and the code before all calls -1.
    """

    def __init__(self) -> None:
        self.call, self.operation = -1, ""
        self.inside = False
        self._counts: Counter[str] = Counter()

    def enter(self, call: int) -> None:
        """Note that a call begins."""
        self.call, self.operation, self.inside = call, "", True
        self._counts.clear()

    def leave(self) -> None:
        """Note that the call ends."""
        self.inside = False

    @property
    def place(self) -> int:
        """The number of the place."""
        return 2 * self.call + (not self.inside)

    def pass_operation(self, func: Any) -> None:
        """Note an operation; those of one name are numbered, so that others may be left out, or added."""
        name = getattr(func, "__name__", type(func).__name__)
        self._counts[name] += 1
        self.operation = f"{name} {self._counts[name]}"

    def label(self, output: int) -> Label:
        """Return the label of an output of the operation, or call, that has been noted last."""
        return Label(self.call, self.operation, output)


@dataclass(frozen=True)
class Carried:
    """A tensor that crosses a cut; with ``differentiable`` its gradient comes back."""

    label: Label
    differentiable: bool


@dataclass(frozen=True)
class Part:
    """The places ``first`` to ``last - 1`` of a step, what arrives before them, and what departs after them."""

    first: int
    last: int
    arriving: tuple[Carried, ...] = ()
    departing: tuple[Carried, ...] = ()
