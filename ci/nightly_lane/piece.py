"""One piece of a stage: a command, and what became of it at which commit."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerator_lane.stage import FAILED, PASSED, Stage, run_stage

from nightly_lane.reach import OpenedFiles

LIMIT_S = 3 * 3600.0
"""Seconds after which a piece hangs, however busy the machine is."""

NOT_POSSIBLE = "not possible here"
NOT_BEGUN = "not begun"


@dataclass(frozen=True)
class Piece:
    """A command, run in the checkout: the whole of a stage, or the ``part`` of it that one can wait for.

    It is not begun where one of the modules in ``needs`` is not installed; ``cannot`` is the exit code with which it
    says that this machine lacks what it needs. ``{folder}`` in an argument stands for a folder of the piece's own.
    """

    stage: str
    command: Sequence[str]
    part: str = ""
    needs: Sequence[str] = ()
    cannot: int | None = None

    @property
    def name(self) -> str:
        """What it is called in the table; unique."""
        return f"{self.stage}: {self.part}" if self.part else self.stage

    @property
    def file(self) -> str:
        """Its name as one of a file."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.name)

    @property
    def missing(self) -> list[str]:
        """The modules that it needs and that are not here."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None]


@dataclass(frozen=True)
class Result:
    """What became of a piece.

    ``counts`` are those of pytest's closing line, by outcome, and ``in_all`` is what a program of ``ci/`` says in its
    last line. ``said`` names what failed. ``read`` are the files of the checkout that it opened, None if not known.
    """

    outcome: str
    commit: str
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    in_all: str = ""
    read: list[str] | None = None

    @property
    def figures(self) -> str:
        """What is known of the piece in numbers, "" if nothing is."""
        return self.in_all or ", ".join(f"{count} {what}" for what, count in self.counts.items())

    @property
    def has_failed(self) -> bool:
        """Whether it is neither green nor impossible here."""
        return self.outcome != PASSED and not self.outcome.startswith((NOT_BEGUN, NOT_POSSIBLE))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def run(piece: Piece, folder: Path, root: Path, commit: str, limit_s: float = LIMIT_S) -> Result:
    """Run a piece in the checkout ``root``; its log and its own files lie in ``folder``."""
    if piece.missing:
        return Result(f"{NOT_BEGUN}: {', '.join(piece.missing)} is not installed", commit)
    log = folder / f"{piece.file}.log"
    log.unlink(missing_ok=True)
    stage = Stage(piece.name, "", tuple(piece.command), limit_s)
    # Without kept bytecode, each of thousands of processes compiles the package again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    opened = OpenedFiles(root)
    ran = run_stage(stage, folder / piece.file, log, environment, limit_s, cwd=root, proceed=False)
    read = opened.so_far()
    outcome = ran.outcome
    if outcome == FAILED:
        outcome = NOT_POSSIBLE if ran.exit_code == piece.cannot else f"{FAILED} ({ran.exit_code})"
    text = log.read_text(encoding="utf-8", errors="replace")
    in_all = re.findall(r"(?m)^In all: (.*)$", text)
    said = [] if outcome == PASSED else failures_in(text)
    return Result(outcome, commit, ran.seconds, ran.counts, said, in_all[-1] if in_all else "", read)


def failures_in(text: str) -> list[str]:
    """Return what pytest's summary of a log names as failed, without the reasons."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return list(dict.fromkeys(re.findall(r"(?m)^(?:FAILED|ERROR|ERRORED|CRASHED|TIMED_OUT) \S+", plain)))
