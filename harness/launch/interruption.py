"""Trains a cell a second time, with an interruption: processes that stop and save, and others that go on."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from harness.core.cell import Cell
from harness.evidence.read import RESUMED, SAVED
from harness.evidence.trace import Trace
from harness.launch.local.launcher import Checkpoint, Launched


def with_interruption(trace: Trace, launched: Launched, cell: Cell, after: int, *, elastic: bool) -> Trace:
    """Return the trace of an uninterrupted launch together with those of an interrupted training.

    ``after`` counts optimizer steps. An ``elastic`` one has another number of devices before the interruption. What
    was launched in vain is not followed by more: a trace that is not whole says why. The checkpoint itself, which may
    hold code, is not kept.

    Raises:
        LaunchError, TraceError: a launch was not possible, or its evidence cannot be read.
    """
    if not trace.is_whole:
        return trace
    # Beside the evidence, which every node can write to.
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=launched.folder))
    try:
        saved = launched.again(cell.resized if elastic else cell, SAVED, Checkpoint(folder, after))
        resumed = launched.again(cell, RESUMED, Checkpoint(folder, None)) if saved.is_whole else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return replace(trace, saved=saved, resumed=resumed)
