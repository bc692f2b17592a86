"""Versions of the installed software: Plumbline, torch, all distributions."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from plumbline.machine.command_output import command_output
from plumbline.machine.repository import head

DISTRIBUTION = "torch-plumbline"
"""The name under which pip knows the project: ``plumbline`` is another one."""

# Nothing that could be a path or an address is published.
_PUBLIC_NAME = re.compile(r"[\w.+!-]{1,100}", re.ASCII)


def plumbline_version() -> str:
    return installed_version(DISTRIBUTION) or "unknown"


def project_commit(root: Path | None = None) -> str | None:
    """Return the commit of Plumbline's checkout, with ``-dirty`` if its code has changes.

    None if Plumbline is installed: it may then lie in another project's repository.
    """
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
    """Return the versions of torch, and of the CUDA and NCCL that it was built with."""
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


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
