"""Errors in reading and writing runs. Each message says what to do."""
# ruff: noqa: N818 - these are named after what is wrong, and all of them are ResultsErrors.

from __future__ import annotations

from plumbline.core.errors import PlumblineError


class ResultsError(PlumblineError):
    """The run's files cannot be written or read."""


class ReportDirUnusable(ResultsError):
    """The report directory is missing, not a directory, or not ours to write in."""


class RunNotFound(ResultsError):
    """There is no run at this path."""


class NothingToResume(ResultsError):
    """The run is complete, another process is writing it, or it is not the run that was asked for."""


class MissingHeader(ResultsError):
    """The file does not begin with a whole header: it is empty, truncated, or not a results file."""


class CorruptRecord(ResultsError):
    """A line inside the file is not a record; the message names file and line (counted from 1)."""


class NewerSchema(ResultsError):
    """The file was written by a newer plumbline than this one."""
