"""The commit of a user's own file."""

from __future__ import annotations

import re
from pathlib import Path

from plumbline.machine.command_output import command_output


def repository_commit(file: Path) -> str | None:
    """Return the commit of the repository of ``file``, with ``-dirty`` if its code has changes; None without one.

    Files of installed packages, and files that git ignores, belong to no repository. Code is dirty if the file is not
    committed, or a committed Python file has changed.
    """
    if any(part.endswith("-packages") for part in file.parts):
        return None
    git = ("git", "--no-optional-locks", "-C", str(file.parent))
    commit = head(file.parent)
    if commit is None:
        return None
    is_committed = bool(command_output(*git, "ls-files", "--", file.name))
    if not is_committed and command_output(*git, "check-ignore", "--", file.name):
        return None
    changes = command_output(*git, "status", "--porcelain", "--untracked-files=no", "--", ":/*.py")
    return commit if is_committed and changes == "" else f"{commit}-dirty"


def head(folder: Path) -> str | None:
    commit = command_output("git", "-C", str(folder), "rev-parse", "--verify", "HEAD")
    return commit if commit is not None and re.fullmatch(r"[0-9a-f]{40,64}", commit) else None
