"""What all callbacks do: attach, and tell the verdict as soon as the steps are recorded."""

from __future__ import annotations

import sys

from plumbline.check.attach import Attachment, attach
from plumbline.check.training_verdict import TrainingVerdict
from plumbline.check.verdict.verdict import Answer
from plumbline.recording.process import rank_and_world


class WrongTrainingError(Exception):
    """A checked training is wrong; the message is the verdict."""


class ToldVerdict:
    """Records the first ``steps`` steps after ``after``. Rank 0 judges them, and prints the verdict to standard error.

    ``stop_when_wrong``: rank 0 then raises ``WrongTrainingError``, which ends the training. ``verdict`` is None until
    it is known, and on other ranks.
    """

    def __init__(self, steps: int = 4, *, after: int = 0, stop_when_wrong: bool = False) -> None:
        self._steps = steps
        self._after = after
        self._stop_when_wrong = stop_when_wrong
        self._attached: Attachment | None = None
        self.verdict: TrainingVerdict | None = None

    def _begin(self) -> None:
        self._attached = attach(steps=self._steps, after=self._after)

    def _look(self) -> None:
        if self._attached is not None and self._attached.is_complete:
            self._end()

    def _end(self) -> None:
        attached, self._attached = self._attached, None
        if attached is None:
            return
        attached.close()
        if (rank_and_world() or (0, 1))[0] == 0:
            self.verdict = attached.verdict()
            print(self.verdict, file=sys.stderr, flush=True)
            if self._stop_when_wrong and self.verdict.answer is Answer.WRONG:
                raise WrongTrainingError(str(self.verdict))
