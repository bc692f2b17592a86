"""The base of all callbacks: attaches to a training, and prints the verdict as soon as the steps are recorded."""

from __future__ import annotations

import sys
from typing import Any

from plumbline.check.attach import Attachment, attach
from plumbline.check.training_verdict import TrainingVerdict
from plumbline.check.verdict.verdict import Answer

LONGEST_WAIT_S = 60.0
"""Seconds that rank 0 waits for the other ranks. They go on training, and communication libraries abort ranks that wait
longer."""


class WrongTrainingError(Exception):
    """A checked training is wrong; the message is the verdict."""


class ToldVerdict:
    """Records ``steps`` steps after the first ``after``. Rank 0 judges them, and prints the verdict to standard error.

    ``stop_when_wrong``: if the training is wrong, rank 0 then raises ``WrongTrainingError``, so that its launcher ends
    all ranks. ``objective`` and ``folder`` are arguments of ``plumbline.attach``. ``verdict`` is None until it is
    known, and stays None on other ranks.
    """

    def __init__(
        self,
        steps: int = 4,
        *,
        after: int = 0,
        stop_when_wrong: bool = False,
        objective: str = "",
        folder: str | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"steps": steps, "after": after, "objective": objective, "folder": folder}
        self._stop_when_wrong = stop_when_wrong
        self._attached: Attachment | None = None
        self.verdict: TrainingVerdict | None = None

    def __enter__(self) -> ToldVerdict:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._end(has_failed=error is not None)

    def _begin(self) -> None:
        if self._attached is not None:  # an earlier training raised an error
            self._attached.close()
        self._attached = attach(**self._options)

    def _look(self) -> None:
        if self._attached is not None and self._attached.is_complete:
            self._end()

    def _end(self, *, has_failed: bool = False) -> None:
        attached, self._attached = self._attached, None
        if attached is None:
            return
        attached.close()
        if attached.rank == 0:
            self._tell(attached)
            stops = self._stop_when_wrong and not has_failed
            if stops and self.verdict is not None and self.verdict.answer is Answer.WRONG:
                raise WrongTrainingError(str(self.verdict))

    def _tell(self, attached: Attachment) -> None:
        try:
            self.verdict = attached.verdict(wait=LONGEST_WAIT_S)
        except Exception as error:  # an error of the check must not end the training
            print(f"plumbline: the training could not be judged: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            print(self.verdict, file=sys.stderr, flush=True)
