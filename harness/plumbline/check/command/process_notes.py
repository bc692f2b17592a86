"""What every Python process of a checked command noted about itself, whether or not it recorded anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PythonProcess:
    """One process: its interpreter, its command line, and how far it came.

    ``rank`` is what the launcher says, None without one. ``torch`` is the version that it imported, "" if none.
    ``obstacle`` says why nothing could be recorded, "" if nothing prevented it. ``ended`` is False where it was killed,
    and ``raised`` is the exception that ended it, "" if none did. ``optimizers``, ``passes`` and ``steps`` count what
    the recorder met, and ``begun`` the optimizers that began a step; they are 0 where it was killed.
    """

    pid: int
    python: str
    words: tuple[str, ...]
    rank: int | None
    torch: str = ""
    obstacle: str = ""
    ended: bool = False
    raised: str = ""
    optimizers: int = 0
    passes: int = 0
    steps: int = 0
    begun: int = 0


def read_processes(folder: Path, ended: Sequence[int] = ()) -> list[PythonProcess]:
    """Return the processes that began below a command, in the order in which they ``ended``, then by their ids."""
    files = {int(file.name.rpartition("-")[2]): file for file in folder.glob("process-*")}
    pids = [pid for pid in ended if pid in files]
    read = [_process(pid, _facts(files[pid])) for pid in (*pids, *sorted(files.keys() - set(pids)))]
    return [one for one in read if one is not None]


def _facts(file: Path) -> Mapping[str, Any]:
    facts: dict[str, Any] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            facts |= json.loads(line)
        except ValueError:  # the process was killed while it wrote
            continue
    return facts


def _process(pid: int, facts: Mapping[str, Any]) -> PythonProcess | None:
    if "python" not in facts:  # a forked process: it began as another one
        return None
    rank = str(facts.get("rank") or "")
    as_noted = ("torch", "ended", "raised", "optimizers", "passes", "steps", "begun")
    return PythonProcess(
        pid,
        facts["python"],
        tuple(facts.get("words", ())),
        int(rank) if rank.isdigit() else None,
        obstacle=facts.get("obstacle") or (facts.get("error") and f"recording failed: {facts['error']}") or "",
        **{name: facts[name] for name in as_noted if name in facts},
    )
