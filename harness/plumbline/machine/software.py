"""The installed software: Plumbline, torch, all distributions, and the commits of code."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

from plumbline.core.software import installed_version

_TIMEOUT_S = 10.0


def command_output(*command: str) -> str | None:
    """Return the output of ``command``, or None if it does not exist, fails, or takes too long."""
    # In a git hook, GIT_DIR and GIT_INDEX_FILE are set, which would make git answer about a different repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def repository_commit(file: Path) -> str | None:
    """Return the commit of the repository that ``file`` belongs to, with ``-dirty`` if its code has changes, or None.

    Files of installed packages, and files that git ignores, belong to no repository. Code has changes if the file is
    not committed, or if a committed Python file has changed.
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


DISTRIBUTION = "torch-plumbline"  # the project's name for pip, where ``plumbline`` is a different project

# Nothing that could be a path or an address is published.
_PUBLIC_NAME = re.compile(r"[\w.+!-]{1,100}", re.ASCII)


def plumbline_version() -> str:
    return installed_version(DISTRIBUTION) or "unknown"


def project_commit(root: Path | None = None) -> str | None:
    """Return the commit of Plumbline's checkout, with ``-dirty`` if its code has changes; None without a checkout."""
    root = root or Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    commit = head(root)
    if commit is None:
        return None
    changes = command_output(
        "git", "--no-optional-locks", "-C", str(root), "status", "--porcelain", "--", "harness", "suites"
    )
    return commit if changes == "" else f"{commit}-dirty"


def torch_versions() -> dict[str, str]:
    """Return the versions of torch, and of the CUDA and NCCL with which it was built."""
    try:
        import torch
    except Exception:  # a broken torch raises OSError, RuntimeError, …
        return {}
    versions = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = str(torch.version.cuda)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions["nccl"] = ".".join(map(str, nccl))
    return versions


def packages() -> dict[str, str]:
    found = {(each.metadata["Name"] or "").lower(): each.version for each in metadata.distributions()}
    return {
        name: version
        for name, version in sorted(found.items())
        if _PUBLIC_NAME.fullmatch(name) and _PUBLIC_NAME.fullmatch(version or "")
    }
