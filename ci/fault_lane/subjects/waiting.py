"""A right trainer whose ranks wait until a file exists; meanwhile, the test takes a node away."""

from __future__ import annotations

import os
import time
from pathlib import Path

from right import declare

FOLDER = "PLUMBLINE_FAULTS_FOLDER"


def wait(job):
    """Write down this rank and the id of its server, and wait."""
    folder = Path(os.environ[FOLDER])
    written = folder / f"rank-{job.rank}.part"
    written.write_text(str(os.getppid()))
    written.rename(folder / f"reached-{job.rank}")
    while not (folder / "go-on").exists():
        time.sleep(0.01)


waits = declare("waits", wait, everywhere=True)
