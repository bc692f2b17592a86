"""Judges windows of steps while a long training runs: reports a line about each, and can end a wrong training."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from plumbline.check.command.checked_command import JudgedWindow
from plumbline.check.command.running import EndOfCommand
from plumbline.check.evidence.options import WINDOW
from plumbline.check.judge.noted import HeadlineNote
from plumbline.check.judge.script_checks import CheckedTraining, judged_trainings, world_size_of
from plumbline.check.verdict.verdict import Answer, accusations, answer_of, sentence_on
from plumbline.core.finding import Finding
from plumbline.core.numbers import compact
from plumbline.report.text import percent

_WORST = list(Answer).index

_NUMBER = re.compile(r"\d[\d.,]*")
"""Numbers, which may differ between notes that say the same of two windows."""


class WindowJudge:
    """Judges each window of steps in ``folder`` once all of its ranks have written it.

    Evidence of a later window is removed unless it is wrong. ``say`` is called with a line about each window.
    ``stop_when_wrong``: end the command at the first window that is wrong.
    """

    def __init__(self, folder: Path, after: int, say: Callable[[str], None], *, stop_when_wrong: bool = False) -> None:
        self.judged: list[JudgedWindow] = []
        self._folder = folder
        self._after = after
        self._say = say
        self._stop = stop_when_wrong
        self._known: set[Path] = set()
        self._noted: set[str] = set()

    def look(self) -> None:
        """Judge the windows that are complete.

        Raises:
            EndOfCommand: a window is wrong, and ``stop_when_wrong`` is set.
        """
        for path in (self._folder, *sorted(self._folder.glob(f"{WINDOW}*"))):
            if path not in self._known and _is_complete(path):
                self._known.add(path)
                self._judge(path)

    def _judge(self, path: Path) -> None:
        step = self._after if path == self._folder else int(path.name.removeprefix(WINDOW))
        trainings = judged_trainings(path)
        worst = max(trainings, key=lambda one: _WORST(answer_of(one)))
        answer, wrong = answer_of(worst), next(accusations(worst), None)
        passed = next((one for one in worst.findings if one.check == "gradients"), None)
        kept = trainings if wrong is not None else []  # the trainings of all windows would fill the memory
        window = JudgedWindow(step, kept, answer.value, sentence_on(worst), wrong is not None)
        self.judged.append(window)
        shares = (worst.coverage.gradients.part, worst.coverage.updates.part)
        self._say(_line(step, answer, shares, wrong or passed, wrong, self._new_notes(worst)))
        if wrong is None and path != self._folder:
            shutil.rmtree(path, ignore_errors=True)
        if wrong is not None and self._stop:
            raise EndOfCommand

    def _new_notes(self, training: CheckedTraining) -> list[str]:
        """Return the notes below the verdict that no earlier window had; the verdict at the end has those of one."""
        notes = [one.message for one in training.findings if isinstance(one, HeadlineNote)]
        new = {without_numbers: note for note in notes if (without_numbers := _NUMBER.sub("", note)) not in self._noted}
        self._noted |= new.keys()
        return [*new.values()] if len(self.judged) > 1 else []


def _line(
    step: int,
    answer: Answer,
    shares: tuple[float, float],
    measured: Finding | None,
    wrong: Finding | None,
    notes: Sequence[str],
) -> str:
    """Return the result as ``name=value`` pairs. A value with a blank or a quotation mark is quoted as in JSON."""
    facts = {
        "step": str(step),
        "verdict": answer.value,
        "gradients": percent(shares[0]).replace(" ", ""),
        "updates": percent(shares[1]).replace(" ", ""),
    }
    if measured is not None and measured.error_x_noise:
        facts["x_noise"] = compact(measured.error_x_noise)
    if wrong is not None:
        facts |= {"check": wrong.check, "cause": str(wrong.cause)}
        facts |= {} if wrong.rank is None else {"rank": str(wrong.rank)}
        facts |= {} if wrong.parameter is None else {"parameter": wrong.parameter}
        facts["message"] = wrong.message
    if notes:
        facts["note"] = " ".join(notes)
    return "plumbline " + " ".join(f"{name}={_quoted(value)}" for name, value in facts.items())


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if " " in value or '"' in value else value


def _is_complete(folder: Path) -> bool:
    ranks = [*folder.glob("rank-*-*")]
    have_ended = all((rank / "end.safetensors").exists() for rank in ranks)
    return bool(ranks) and have_ended and len(ranks) >= world_size_of(folder)
