"""What goes wrong before or around a cell. Each error is a sentence that says what to do."""

from __future__ import annotations


class PlumblineError(Exception):
    """Base of every error that is meant for the person at the keyboard."""


class PlanError(PlumblineError):
    """The options ask for something that cannot be planned."""


class SubjectError(PlumblineError):
    """A subject cannot be found, loaded or understood."""


class LaunchError(PlumblineError):
    """The harness itself could not bring ranks to life."""


class TraceError(PlumblineError):
    """A trace cannot be read: missing, truncated, or of another schema."""
