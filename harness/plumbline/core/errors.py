"""Errors before or around a cell. The message of each is a sentence that says what to do."""

from __future__ import annotations


class PlumblineError(Exception):
    """Base of every error whose message is shown to the user without a traceback."""


class UsageError(PlumblineError):
    """What was asked for cannot be done: the command line has to change."""


class PlanError(UsageError):
    """The options cannot be planned."""


class SubjectError(UsageError):
    """A subject cannot be found or imported, or its declaration is invalid."""


class WorkloadError(UsageError):
    """A workload of the user's own cannot be found or imported, or a trainer cannot be judged on it."""


class LaunchError(PlumblineError):
    """The harness could not start ranks, or lost them."""


class TraceError(PlumblineError):
    """A trace cannot be read: missing, truncated, or of another schema."""
