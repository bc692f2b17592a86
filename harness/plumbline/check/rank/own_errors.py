"""Keeps the recorder's own errors from the user's script."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable
from typing import TypeVar

from plumbline.check.rank.memory_needed import NotEnoughMemoryError
from plumbline.check.rank.store_exchange import UnreachableFolderError

T = TypeVar("T")


class OwnErrors:
    """Runs code of the recorder. ``first`` is its first error, in words for the verdict, "" without one.

    ``after_error`` is called after each error.
    """

    def __init__(self, after_error: Callable[[], None]) -> None:
        self.first = ""
        self._after_error = after_error

    def keep(self, do: Callable[[], T]) -> T | None:
        """Call ``do``. If it fails, return None, so that the script goes on."""
        try:
            return do()
        except Exception as error:
            self.first = self.first or _in_words(error)
            self._after_error()
            return None


def _in_words(error: Exception) -> str:
    if isinstance(error, (NotEnoughMemoryError, UnreachableFolderError)):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"evidence cannot be written ({error.strerror}): free some space, or set TMPDIR to another folder"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
