"""Reads the output of ``plumbline check --json`` about one run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbline.core.finding import RAISED

BAD = ("failed", "crashed", "timed_out")


@dataclass(frozen=True)
class Verdict:
    """The verdict on a command: ``right``, ``right in part``, ``wrong`` or ``not judged``, and the sentence behind it.

    ``check`` and ``cause`` are those of the first bad finding, and ``noise`` is its error in units of rounding noise.
    If nothing is wrong, ``noise`` is the largest error. ``bad`` names all bad findings. ``coverage`` is the share of
    the trainable parameters that was recomputed, or None if nothing was recorded. ``broken`` names the checks that
    raised an exception.
    """

    answer: str
    sentence: str
    check: str | None = None
    cause: str | None = None
    noise: float | None = None
    bad: tuple[str, ...] = ()
    coverage: float | None = None
    broken: tuple[str, ...] = ()


def read_verdict(file: Path) -> Verdict:
    """Read the file of ``--json``."""
    whole = json.loads(file.read_text(encoding="utf-8"))
    trainings: list[dict[str, Any]] = whole["trainings"]
    trainings.sort(key=lambda one: one["verdict"] != whole["verdict"])
    findings = [finding for one in trainings for finding in one["findings"]]
    bad = [finding for finding in findings if finding["outcome"] in BAD]
    noises = [finding["error_x_noise"] for finding in bad[:1] or findings]
    return Verdict(
        whole["verdict"],
        whole["sentence"],
        bad[0]["check"] if bad else None,
        (bad[0]["cause"] or "unexplained") if bad else None,
        max((noise for noise in noises if noise is not None), default=None),
        tuple(f"{one['check']}: {one['cause'] or 'unexplained'}" for one in bad),
        min((one["coverage"]["replayed"] for one in trainings), default=None),
        tuple(one["check"] for one in findings if one["outcome"] == "errored" and RAISED in one.get("message", "")),
    )
