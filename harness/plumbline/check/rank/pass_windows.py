"""Which backward passes belong to an optimizer step.

A pass belongs to the optimizers that step after it, before the next pass begins. So the passes of two optimizers that
take turns, as those of a GAN, are told apart although each leaves gradients in the other's parameters.
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
    """Keeps the passes until every optimizer that they concern has stepped."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._last_step: dict[int, int] = {}

    def add(self, one: ArrivedGradients) -> None:
        """Note a backward pass: what has been stepped after belongs to others from now on."""
        for entry in self._entries:
            entry.closed = entry.closed or bool(entry.steps)
        self._entries.append(_Entry(one))

    def take(
        self, optimizer: int, running: ArrivedGradients | None = None
    ) -> tuple[list[ArrivedGradients], list[ArrivedGradients]]:
        """Return the passes since an optimizer's last step that belong to the step it takes now, and the others.

        They are those of its next step as well if this one raises, and no pass begins before it is taken again.

        Args:
            optimizer: the number of the optimizer.
            running: the pass inside of which it steps, from a hook on its parameter.
        """
        last = self._last_step.get(optimizer, -1)
        since = [entry for entry in self._entries if entry.one.number > last]
        own = [entry for entry in since if not entry.closed]
        for entry in own:
            entry.steps.add(optimizer)
        passes = [entry.one for entry in own] + ([] if running is None else [running])
        return passes, [entry.one for entry in since if entry.closed]

    def stepped(self, optimizer: int, running: ArrivedGradients | None = None) -> None:
        """Note that an optimizer has taken its step, and forget passes that no optimizer known so far will ask for.

        The latest ones are kept: an optimizer that has not stepped yet may do so, after the others.
        """
        latest = [entry.one.number for entry in self._entries[-1:]] + ([] if running is None else [running.number])
        if latest:
            self._last_step[optimizer] = max(latest)
        if self._last_step:
            least = min(self._last_step.values())
            self._entries = [entry for entry in self._entries if not entry.closed or entry.one.number > least]
