"""Writes the file that an option names: completely or not at all, through symlinks, and into devices and pipes."""

from __future__ import annotations

import os
from pathlib import Path

from plumbline.core.errors import PlanError, PlumblineError


class OutputError(PlumblineError):
    """The file that an option names cannot be written."""


def write_output(file: Path, text: str) -> None:
    """Write ``text`` to ``file``, or leave it as it was; raise ``OutputError`` if that is not possible."""
    try:
        if _is_written_directly(file):
            with open(os.open(file, os.O_WRONLY | os.O_APPEND), "w", encoding="utf-8") as stream:
                stream.write(text)
            return
        target, beside = _target_and_beside(file)
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}") from error


def refuse_unwritable(option: str, file: Path) -> None:
    """Refuse the file of an option if ``write_output`` could not write it. The file is left as it is.

    Raises:
        PlanError: it is a folder, its folder does not exist, or it cannot be written.
    """
    if os.path.isdir(file):
        raise PlanError(f"{option}: {file} is a folder: name a file")
    refuse_file_as_folder(option, file.parent)
    if not os.path.isdir(file.parent):
        raise PlanError(f"{option}: there is no folder {file.absolute().parent} for {file.name}: create it first")
    if os.path.exists(file) and not os.access(file, os.W_OK):
        raise PlanError(f"{option}: {file} is not writable: choose another place")
    if _is_written_directly(file):
        return
    target, beside = _target_and_beside(file)
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise PlanError(
            f"{option}: cannot create {target.name} in {target.parent}: {error.strerror or error}; choose another place"
        ) from error


def refuse_file_as_folder(option: str, folder: Path) -> None:
    """Refuse a folder of an option if this path, or one above it, is a file."""
    there = next((one for one in (folder, *folder.parents) if os.path.exists(one)), None)
    if there is not None and not os.path.isdir(there):
        raise PlanError(f"{option}: {there} is a file, not a folder: name a folder")


def _is_written_directly(file: Path) -> bool:
    """Return whether no other file must take its place, as of a device, a pipe or an open stream."""
    # /dev/stdout may lead to a regular file, to which a command still writes.
    return os.path.exists(file) and (not os.path.isfile(file) or file.absolute().parts[1:2] in (("dev",), ("proc",)))


def _target_and_beside(file: Path) -> tuple[Path, Path]:
    # In the target's folder, because a rename is atomic only within one file system.
    target = Path(os.path.realpath(file))
    return target, target.with_name(f".{target.name}.{os.getpid()}")
