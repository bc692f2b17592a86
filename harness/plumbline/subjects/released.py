"""What the adapters of released trainers share: each says which command installs its library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plumbline.core.errors import SubjectError


@contextmanager
def installed_by(command: str) -> Iterator[None]:
    """Import a trainer's library inside of this; where it is not installed, ``command`` is the way out.

    Raises:
        SubjectError: the library, or something that it needs, cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise SubjectError(
            f"its library cannot be imported in this environment ({error}): run `{command}` here, "
            'or name an interpreter that has it, as in --subject "…;python=/path/to/python"'
        ) from error
