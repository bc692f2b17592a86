"""Imports of libraries under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plumbline.core.errors import SubjectError


@contextmanager
def installed_by(command: str) -> Iterator[None]:
    """Import a library in this context. If that fails, the error names the ``command`` that installs it.

    Raises:
        SubjectError: the library, or one of its dependencies, cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise SubjectError(
            f"its library cannot be imported in this environment ({error}): run `{command}`, or choose an interpreter "
            'that has it with --subject "…;python=/path/to/python"'
        ) from error
