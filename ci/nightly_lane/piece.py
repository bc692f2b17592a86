"""One piece of a stage: a command, its result, and the commit of the result."""

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
"""The time limit in seconds: a piece that takes longer hangs, even on a busy machine."""

NOT_POSSIBLE = "not possible here"
NOT_BEGUN = "not begun"


@dataclass(frozen=True)
class Piece:
    """A command, run in the checkout: a whole stage, or a ``part`` of it that does not take too long.

    It does not start if one of the modules in ``needs`` is missing. ``cannot`` is the exit code that says that the
    machine lacks something. ``{folder}`` in an argument stands for the piece's own folder.
    """

    stage: str
    command: Sequence[str]
    part: str = ""
    needs: Sequence[str] = ()
    cannot: int | None = None

    @property
    def name(self) -> str:
        """The unique name in the table."""
        return f"{self.stage}: {self.part}" if self.part else self.stage

    @property
    def file(self) -> str:
        """The name as a file name."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.name)

    @property
    def missing(self) -> list[str]:
        """The required modules that are not installed."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None]


@dataclass(frozen=True)
class Result:
    """The result of a piece.

    ``counts`` are those of pytest's last line, by outcome, and ``in_all`` is the summary in the last line of a program
    of ``ci/``. ``said`` names failures. ``read`` lists the files of the checkout that the piece opened, or is None if
    unknown.
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
        """The piece's figures, or ""."""
        return self.in_all or ", ".join(f"{count} {what}" for what, count in self.counts.items())

    @property
    def has_failed(self) -> bool:
        """Whether the piece failed: it neither passed nor was impossible here."""
        return self.outcome != PASSED and not self.outcome.startswith((NOT_BEGUN, NOT_POSSIBLE))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def run(piece: Piece, folder: Path, root: Path, commit: str, limit_s: float = LIMIT_S) -> Result:
    """Run a piece in the checkout ``root``; its log and its own files are in ``folder``."""
    if piece.missing:
        return Result(f"{NOT_BEGUN}: {', '.join(piece.missing)} is not installed", commit)
    log = folder / f"{piece.file}.log"
    log.unlink(missing_ok=True)
    stage = Stage(piece.name, "", tuple(piece.command), limit_s)
    # Without cached bytecode, each of thousands of processes compiles the package again.
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
    """Return the failures that pytest's summary in a log names, without reasons."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return list(dict.fromkeys(re.findall(r"(?m)^(?:FAILED|ERROR|ERRORED|CRASHED|TIMED_OUT) \S+", plain)))
