"""Which optimizer steps are running: of an optimizer inside of an optimizer the outer one's step is the script's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch.optim.optimizer import Optimizer

_STEPS_IN = Optimizer.profile_hook_step.__code__.co_filename
"""The file of the function around every optimizer's step, which calls the hooks."""


class RunningSteps:
    """Knows steps by their frames on the stack: no hook sees the end of a step that raises."""

    def __init__(self) -> None:
        self._frames: list[FrameType] = []

    def enter(self) -> bool:
        """Return whether the step that begins is the script's."""
        frames = self._forget_ended()
        self._frames.append(next((one for one in frames if one.f_code.co_filename == _STEPS_IN), frames[0]))
        return len(self._frames) == 1

    def leave(self) -> bool:
        """Return whether the step that ends is the script's."""
        self._forget_ended()
        del self._frames[-1:]
        return not self._frames

    def _forget_ended(self) -> list[FrameType]:
        """Keep the steps that are still on the stack, which is returned."""
        frames = list(_stack())
        self._frames = [one for one in self._frames if one in frames]
        return frames


def _stack() -> Iterator[FrameType]:
    """Yield the frames of this thread above this file's, from the innermost on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
