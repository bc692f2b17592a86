"""A small memory control group, for ranks that the kernel should kill."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUP = "PLUMBLINE_FAULTS_MEMORY_GROUP"
"""The variable with the group's folder, or "" if none could be created."""

_LIMIT = 1 << 30


@contextmanager
def memory_group() -> Iterator[None]:
    """Create a group below this process's own, name it in the environment, and remove it at the end."""
    folder = _made()
    os.environ[GROUP] = str(folder or "")
    try:
        yield
    finally:
        for _ in range(50):
            if folder is None or not folder.exists():
                break
            with suppress(OSError):
                folder.rmdir()
            time.sleep(0.1)


def _made() -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" not in controllers.split(","):
            continue
        place = Path(f"/sys/fs/cgroup/memory{path}")
        for left in place.glob("plumbline-faults-*"):
            with suppress(OSError):  # it is not empty
                left.rmdir()
        folder = place / f"plumbline-faults-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / "memory.limit_in_bytes").write_text(str(_LIMIT))
        except OSError:
            with suppress(OSError):
                folder.rmdir()
            continue
        return folder
    return None
