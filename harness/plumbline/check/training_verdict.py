"""The verdict on the trainings of the calling program, as an object."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.report.terminal import trainings_screen
from plumbline.check.verdict.verdict import Answer, worst
from plumbline.core.finding import Finding


@dataclass(frozen=True)
class TrainingVerdict:
    """The answer for one or more ``trainings``, and its reason. ``print`` and notebooks show all of it.

    ``obstacle`` says what went wrong during recording, or why no step was recorded; "" if all went well.
    """

    trainings: tuple[CheckedTraining, ...]
    obstacle: str = ""

    @property
    def answer(self) -> Answer:
        """The worst answer: ``RIGHT``, ``RIGHT_IN_PART``, ``NOT_JUDGED`` or ``WRONG``."""
        return self._answer[0]

    @property
    def sentence(self) -> str:
        """The reason for the answer."""
        return self._answer[1]

    @property
    def right(self) -> bool:
        """Whether at least 99 % of gradients and updates were judged, and nothing is wrong."""
        return self.answer is Answer.RIGHT

    @property
    def findings(self) -> list[Finding]:
        """All findings, of all trainings."""
        return [finding for one in self.trainings for finding in one.findings]

    def assert_right(self, *, require_full: bool = False) -> None:
        """Raise unless every training was judged and nothing in it is wrong.

        ``require_full``: also raise if less than 99 % of gradients or updates was judged.

        Raises:
            AssertionError: what is wrong and what to look at, or why nothing was judged.
        """
        __tracebackhide__ = True
        if not self.right and (require_full or self.answer is not Answer.RIGHT_IN_PART):
            raise AssertionError(f"{self.answer.value}: {self.sentence}{''.join(self._messages())}")

    def __repr__(self) -> str:
        return f"{self.answer.value.upper()}: {self.sentence}"

    def __str__(self) -> str:
        return trainings_screen(self.trainings, self.answer, self.sentence, self.obstacle if self.trainings else "")

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    @property
    def _answer(self) -> tuple[Answer, str]:
        if self.trainings:
            return worst(self.trainings)
        why = self.obstacle or "no optimizer of torch.optim has completed a step on any rank"
        return Answer.NOT_JUDGED, f"nothing was recorded: {why}"

    def _messages(self) -> Sequence[str]:
        return [f"\n  {one.check}: {one.message}" for one in self.findings if one.outcome.is_bad]
