"""The versions of a subject's library, torch and Python."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Software:
    """``library`` is the package under test and ``version`` its version. None: unknown."""

    library: str | None = None
    version: str | None = None
    torch: str | None = None
    python: str | None = None

    @classmethod
    def here(cls, library: str | None) -> Software:
        return cls(
            library, library and installed_version(library), installed_version("torch"), platform.python_version()
        )

    def __str__(self) -> str:
        library = f"{self.library} {self.version or ''}".strip() if self.library not in (None, "torch") else None
        parts = (library, self.torch and f"torch {self.torch}", self.python and f"python {self.python}")
        return ", ".join(part for part in parts if part)


UNKNOWN = Software()


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
