"""Errors whose message says what is wrong and what to do, and exit codes that several commands share."""


class PlumblineError(Exception):
    """Base of the errors that are shown to the user without a traceback."""


class UsageError(PlumblineError):
    """The command line has to change."""


class PlanError(UsageError):
    """The options cannot be planned."""


class SubjectError(UsageError):
    """A subject cannot be found or imported, or its declaration is invalid."""


class WorkloadError(UsageError):
    """One of the user's own workloads cannot be found or imported, or trainers cannot be judged on it."""


class LaunchError(PlumblineError):
    """The harness could not start ranks, or lost them."""


class TraceError(PlumblineError):
    """A trace cannot be read: missing, truncated, or of another schema."""


TROUBLE = 2
"""The command failed; standard error says why."""

USAGE = 4
"""The command line is invalid. pytest uses the same code."""

RIGHT, TRAINER_WRONG, ADAPTER_WRONG = 0, 1, 2
"""The results of ``plumbline smoke``."""
