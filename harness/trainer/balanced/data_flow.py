"""Which tensors a step computes between its blocks, where it uses them, and between which calls it cannot be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.trainer.balanced.labels import Carried, Label


@dataclass
class CarriedTensor:
    """A tensor that a step computes from what blocks return: ``last_use`` is the last place where it is used."""

    last_use: int
    differentiable: bool
    bytes: int


@dataclass
class DataFlow:
    """The tensors of a step between calls, by label, and why it cannot be cut before a place, by its number.

    ``weights`` has for each place the ids of parameters and buffers that are used there; ``drawn`` labels what
    operations between calls draw at random. ``labels.Position`` tells what places are.
    """

    calls: Sequence[str]
    tensors: dict[Label, CarriedTensor] = field(default_factory=dict)
    weights: list[set[int]] = field(default_factory=list)
    drawn: set[Label] = field(default_factory=set)
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

    def after(self, call: int) -> str:
        """Return what a message calls a call together with the code that follows it."""
        return f"{self.calls[call] or 'the module itself'} or the code after it" if call >= 0 else "the step's begin"
