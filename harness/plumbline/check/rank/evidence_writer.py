"""Writes what one process recorded: a file after each optimizer step, and one at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property

import torch
from torch import Tensor

from plumbline.check.evidence.options import GROUP, INTERRUPTED, WINDOW
from plumbline.check.evidence.training import BackwardPass, Facts, RecordedStep, vectors_of
from plumbline.evidence.rank_file import write_file
from plumbline.recording.process import group_name

SUFFIX = ".safetensors"

LATER = "later"
"""Name of the file with facts that observers note after the recorded steps."""


class EvidenceWriter:
    """Writes the steps of this process to its own folder ``rank-RANK-PID/`` in ``folder``.

    The rank can be unknown until the first step, so nothing is written before that.
    """

    def __init__(self, folder: Callable[[], str]) -> None:
        """``folder`` is called once, before the first step is written."""
        self._find = folder
        self._steps = 0
        self._group = GROUP

    @cached_property
    def _folder(self) -> str:
        return self._find()

    def of_window(self, step: int) -> EvidenceWriter:
        """Return a writer for the later window that begins with this step. It writes to a folder inside this one."""
        return EvidenceWriter(lambda: os.path.join(self._folder, f"{WINDOW}{step:09d}"))

    @property
    def has_steps(self) -> bool:
        return self._steps > 0

    def write_step(self, rank: int, world_size: int, step: RecordedStep) -> None:
        """Write one step.

        Raises:
            OSError: the file cannot be written.
        """
        tensors = vectors_of(step)
        values = {
            "rank": rank,
            "world_size": world_size,
            "optimizer": step.optimizer,
            "number": step.number,
            "parameters": [vars(parameter) for parameter in step.parameters],
            "passes": [_pass(f"pass {index}", one, tensors) for index, one in enumerate(step.passes)],
            "other_passes": [_pass(f"other {index}", one, tensors) for index, one in enumerate(step.other_passes)],
            "skipped": step.skipped,
            "norm": step.norm,
            "facts": step.facts,
        }
        write_file(os.path.join(self._own(rank), f"step-{self._steps:05d}{SUFFIX}"), values, tensors)
        self._steps += 1

    def write_end(self, rank: int, facts: Facts, error: str) -> None:
        """Write facts about the whole process, and the recorder's error.

        Raises:
            OSError: the file cannot be written.
        """
        values = {"facts": facts, "error": error, "torch": torch.__version__}
        write_file(os.path.join(self._own(rank), f"end{SUFFIX}"), values, {})

    def write_later(self, rank: int, facts: Facts) -> None:
        """Write what is known of the process after its recorded steps, and replace what was written before.

        Raises:
            OSError: the file cannot be written.
        """
        write_file(os.path.join(self._own(rank), f"{LATER}{SUFFIX}"), {"facts": facts}, {})

    def wait_for_ends(self, ranks: int, seconds: float) -> None:
        """Wait until ``ranks`` ranks have written their end, but at most ``seconds``."""
        _wait_until(lambda: self._ends() >= ranks, seconds)

    def wait_for_interrupted(self, rank: int, ranks: int, seconds: float) -> None:
        """Note that this rank is about to end, and wait until ``ranks`` ranks are, but at most ``seconds``."""
        with open(os.path.join(self._folder, f"{INTERRUPTED}{rank}"), "w", encoding="utf-8"):
            pass
        _wait_until(lambda: sum(one.name.startswith(INTERRUPTED) for one in os.scandir(self._folder)) >= ranks, seconds)

    def _ends(self) -> int:
        ranks = [one.path for one in os.scandir(self._folder) if one.name.startswith("rank-")]
        own = [path for path in ranks if os.path.exists(os.path.join(path, self._group))]
        return sum(os.path.exists(os.path.join(path, f"end{SUFFIX}")) for path in own)

    def _own(self, rank: int) -> str:
        folder = os.path.join(self._folder, f"rank-{rank}-{os.getpid()}")
        # Folders that the check has removed are not created again.
        if os.path.basename(self._folder).startswith(WINDOW):
            with suppress(FileExistsError):
                os.mkdir(self._folder)
        with suppress(FileExistsError):
            os.mkdir(folder)
            self._group = f"{GROUP}{group_name()}"
            with open(os.path.join(folder, self._group), "w", encoding="utf-8"):
                pass
        return folder


def _wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not holds():
        time.sleep(0.02)


def _pass(name: str, one: BackwardPass, tensors: dict[str, Tensor]) -> Facts:
    tensors.update({f"{name}/{kind}": vector for kind, vector in vectors_of(one).items()})
    return {"number": one.number, "scale": one.scale, "facts": one.facts}
