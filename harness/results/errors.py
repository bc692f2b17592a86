"""What goes wrong between a run and its disk. Each error is a sentence that says what to do."""
# ruff: noqa: N818 - these are named after what is wrong, and all of them are StoreErrors.

from __future__ import annotations

from harness.core.errors import PlumblineError


class StoreError(PlumblineError):
    """The run's files cannot be written or read."""


class ReportDirUnusable(StoreError):
    """The report directory is missing, not a directory, or not ours to write in."""


class RunNotFound(StoreError):
    """There is no run at this path."""


class RunTooLarge(StoreError):
    """The file is larger than any run of this program writes."""


class NothingToResume(StoreError):
    """The run came to its end, another process is writing it, or it is not the run that was asked for."""


class MissingHeader(StoreError):
    """The file does not begin with a whole header: it is empty, cut off, or something else altogether."""


class CorruptRecord(StoreError):
    """A line inside the file is not a record; the message names file and line (counted from 1)."""


class NewerSchema(StoreError):
    """The file was written by a newer plumbline than this one."""
