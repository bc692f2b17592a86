"""A hash of the package's files, which tells whether two processes run the same Plumbline."""

from __future__ import annotations

import hashlib
from pathlib import Path


def package_hash() -> str:
    """Return the SHA-256 of all Python files of this package and their paths in it."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\n{file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
