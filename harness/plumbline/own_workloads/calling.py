"""Calls of the user's code, whose exceptions become error messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plumbline.core.errors import PlumblineError, WorkloadError
from plumbline.user_code.user_traceback import headline, user_traceback


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn an exception in the user's code into an error that begins with ``what`` is called.

    Raises:
        WorkloadError: the code raised.
    """
    try:
        yield
    except PlumblineError:
        raise
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"{what} raises {headline(error)}\n{user_traceback(error)}") from error
