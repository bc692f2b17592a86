"""Assigns backward passes to optimizer steps.

Successive passes belong to the optimizers that step after them, before another pass begins. This separates the passes
of two optimizers that take turns, as in a GAN, although each leaves gradients in the other's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from plumbline.check.rank.local_gradients import ArrivedGradients


@dataclass
class _Entry:
    one: ArrivedGradients
    steps: set[int] = field(default_factory=set)
    closed: bool = False


class PassWindows:
    """Keeps passes until every optimizer that they concern has stepped."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._last_step: dict[int, int] = {}

    def add(self, one: ArrivedGradients) -> None:
        """Add a backward pass. It closes the earlier passes after which an optimizer has already stepped."""
        for entry in self._entries:
            entry.closed = entry.closed or bool(entry.steps)
        self._entries.append(_Entry(one))

    def take(
        self, optimizer: int, running: ArrivedGradients | None = None
    ) -> tuple[list[ArrivedGradients], list[ArrivedGradients]]:
        """Return the passes since an optimizer's last step: those that belong to its current step, and the others.

        If the step raises, and is taken again before another pass begins, it gets the same passes again.

        Args:
            optimizer: the number of the optimizer.
            running: the backward pass inside which the optimizer steps, from a hook on its parameter.
        """
        last = self._last_step.get(optimizer, -1)
        since = [entry for entry in self._entries if entry.one.number > last]
        own = [entry for entry in since if not entry.closed]
        for entry in own:
            entry.steps.add(optimizer)
        passes = [entry.one for entry in own] + ([] if running is None else [running])
        return passes, [entry.one for entry in since if entry.closed]

    def takes_turns(self, optimizer: int, other: int) -> bool:
        """Return whether two optimizers took their last steps after different passes."""
        return self._last_step.get(optimizer) != self._last_step.get(other)

    def stepped(self, optimizer: int, running: ArrivedGradients | None = None, *, optimizers: int = 0) -> None:
        """Note that an optimizer has taken its step, and forget passes that no known optimizer needs any more.

        All passes are kept for those of the first ``optimizers`` that have not stepped yet: some step less often than
        others. The latest are also kept for optimizers that are not known yet, and may step after the others.
        """
        latest = [entry.one.number for entry in self._entries[-1:]] + ([] if running is None else [running.number])
        if latest:
            self._last_step[optimizer] = max(latest)
        if self._last_step:
            least = min(self._last_step.get(number, -1) for number in {*self._last_step, *range(optimizers)})
            self._entries = [entry for entry in self._entries if not entry.closed or entry.one.number > least]
