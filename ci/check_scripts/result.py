"""The result of one script, with or without a mistake, and whether it is as expected."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mistake import Mistake
from running import Ran
from script import Script
from verdict import Verdict

SAME, CHANGED, UNSTEADY = "the same", "**changed**", "differ without it too"
LAST_LINES = 25
PRAISE = ("right", "right in part")
"""Verdicts that call a training right."""


@dataclass(frozen=True)
class Result:
    """The result of one script, with or without a mistake.

    Attributes:
        script: its name.
        mistake: the mistake's name, "" if there is none in it.
        plain_seconds: the time of a plain run.
        seconds: the time under check.
        losses: whether the losses under check equal those of a plain run; "" if they were not compared.
        verdict: check's verdict, or None without one.
        failed: the end of the output of a plain run that failed.
        why_not: why it could not run.
    """

    script: str
    mistake: str = ""
    plain_seconds: float | None = None
    seconds: float | None = None
    losses: str = ""
    verdict: Verdict | None = None
    failed: str = ""
    why_not: str = ""

    @property
    def name(self) -> str:
        """The script, with its mistake if it has one."""
        return f"{self.mistake} in {self.script}" if self.mistake else self.script

    @property
    def slower(self) -> float | None:
        """The time under check relative to a plain run, both of whole commands."""
        return self.seconds / self.plain_seconds if self.seconds and self.plain_seconds else None


def is_right(result: Result, script: Script, mistake: Mistake | None) -> bool:
    """Return whether a result is as expected; a script that could not run counts as such."""
    if result.why_not:
        return True
    if result.failed or result.losses == CHANGED or result.verdict is None or result.verdict.broken:
        return False
    if mistake is None:
        return result.verdict.answer in script.accepted
    if mistake.causes:
        return result.verdict.answer == "wrong" and result.verdict.cause in mistake.causes
    return result.verdict.answer != "wrong"


def is_false_praise(result: Result, script: Script, mistake: Mistake | None) -> bool:
    """Return whether a verdict calls something right that is wrong or was not fully judged."""
    return _answer(result) in PRAISE and _answer(result) not in _accepted(script, mistake)


def is_false_accusation(result: Result, script: Script, mistake: Mistake | None) -> bool:
    """Return whether a verdict calls a right training wrong, or a change that may be intended."""
    return _answer(result) == "wrong" and "wrong" not in _accepted(script, mistake)


def _answer(result: Result) -> str:
    return result.verdict.answer if result.verdict else ""


def _accepted(script: Script, mistake: Mistake | None) -> tuple[str, ...]:
    if mistake is None:
        return script.accepted
    return ("wrong",) if mistake.causes else (*PRAISE, "not judged")


def losses_of(first: Ran, recorded: Ran, second: Ran | None) -> str:
    """Compare the losses of a plain run with those under check, and with those of a second plain run."""
    if recorded.losses == first.losses:
        return SAME
    return CHANGED if second is not None and second.losses == first.losses else UNSTEADY


def first_difference(plain: Ran, recorded: Ran) -> str:
    """Return each rank's first loss that differs under check, or "" if all are equal."""
    told = []
    for rank in sorted(plain.losses.keys() | recorded.losses.keys()):
        pairs = zip_longest(plain.losses.get(rank, ()), recorded.losses.get(rank, ()), fillvalue="none")
        place, one, other = next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), (0, "", ""))
        if one != other:
            told.append(f"rank {rank}, loss {place}: {one} without check, {other} under it")
    return "\n".join(told)


def last_lines(ran: Ran) -> str:
    """Return the end of a run's output."""
    return "\n".join(ran.output.splitlines()[-LAST_LINES:])


def write(file: Path, result: Result) -> None:
    """Append a result to a file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(result)) + "\n")


def read(file: Path) -> dict[str, Result]:
    """Return the last result in a file for each thing that ran; empty if there is no file."""
    if not file.exists():
        return {}
    results = (_result(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines())
    return {one.name: one for one in results}


def _result(values: dict[str, Any]) -> Result:
    verdict = values.pop("verdict")
    if verdict is not None:
        verdict["bad"] = tuple(verdict["bad"])
        verdict["broken"] = tuple(verdict.get("broken", ()))
        verdict = Verdict(**verdict)
    return Result(**values, verdict=verdict)
