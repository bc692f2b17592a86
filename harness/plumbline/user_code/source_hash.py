"""The hash of a module's source and of what it imports from its own folder."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType


def sha256_of(module: ModuleType) -> str:
    """Return the SHA-256 of a module's source and of the modules in its folder that it imports names from.

    Installed packages, and what a function imports when it runs, are not included.
    """
    first = Path(str(module.__file__)).resolve()
    home = first.parents[module.__name__.count(".")]
    digest = hashlib.sha256()
    for file in sorted(_sources(module, home, {first})):
        digest.update(file.relative_to(home).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources(module: ModuleType, home: Path, found: set[Path]) -> set[Path]:
    for value in list(vars(module).values()):
        name = str(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", ""))
        other = sys.modules.get(name)
        file = getattr(other, "__file__", None)
        if other is None or not file or name.partition(".")[0] == "plumbline" or "-packages" in file:
            continue
        path = Path(file).resolve()
        if path.suffix == ".py" and path.is_relative_to(home) and path not in found:
            found.add(path)
            _sources(other, home, found)
    return found
