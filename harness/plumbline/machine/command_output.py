"""The output of other programs: git, nvidia-smi."""

from __future__ import annotations

import os
import subprocess

_TIMEOUT_S = 10.0


def command_output(*command: str) -> str | None:
    """Return the output of ``command``, or None if it does not exist, fails, or takes too long."""
    # A git hook sets GIT_DIR and GIT_INDEX_FILE, which would make git answer about another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=_TIMEOUT_S,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
