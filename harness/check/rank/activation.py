"""Installs the recorder in a process of the user's command, as soon as torch is imported there."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

from harness.check.options import read_options
from harness.check.rank.evidence_writer import EvidenceWriter
from harness.check.rank.recorder import TrainingRecorder


def activate(folder: str, note: Callable[..., None]) -> None:
    """Record the optimizer steps of this process, as the options in ``folder`` say, and write them there.

    ``note`` adds facts to the notes about this process.

    Raises:
        OSError, ValueError: the folder has no options.
    """
    recorder = TrainingRecorder(read_options(folder), EvidenceWriter(folder))
    recorder.install()
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            recorder.finish()
            note(**recorder.progress)

    atexit.register(end)
    # A forked process is another one: it takes steps of its own, or none.
    os.register_at_fork(after_in_child=recorder.forget)
