"""Atomic replacement: readers see the old file or link, or the new one, and nothing between."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from plumbline.results.errors import ResultsError


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, over an existing file or link: where a link leads is left as it is.

    Raises:
        ResultsError: the folder is not writable.
    """
    beside = _name_beside(path)
    try:
        beside.write_bytes(text.encode())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ResultsError(f"Cannot write {path} ({error.strerror}): make its folder writable.") from error


def point_symlink(link: Path, target: str) -> None:
    """Make ``link`` a symlink to ``target``, over an existing link.

    Raises:
        OSError: ``link`` is a folder, or the file system has no symlinks.
    """
    beside = _name_beside(link)
    try:
        beside.symlink_to(target, target_is_directory=True)
        os.replace(beside, link)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _name_beside(path: Path) -> Path:
    """Return an unused name in the same folder: a rename is atomic only within one file system."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
