"""Which cells a pytest command means, found out by asking it to collect them in a process of its own.

Run as a module it is that process: ``python -m harness.slurm.matrix FILE suites/ --gpus 8`` leaves them in FILE.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.errors import PlanError


@dataclass(frozen=True)
class Selected:
    """A cell that was selected: its id, what pytest calls it (with an absolute path), and its coordinates as JSON."""

    cell: str
    nodeid: str
    planned: dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """What a pytest command selects: cells, in order.

    ``reports`` is where runs are written, ``flags`` are pytest's words but for paths.
    """

    cells: tuple[Selected, ...]
    reports: Path
    flags: tuple[str, ...]


def select(arguments: Sequence[str]) -> Selection:
    """Return what ``pytest ARGUMENTS`` would examine.

    Planned for simulated devices, because the machine that submits need not have any; nothing is trained.

    Raises:
        PlanError: pytest refuses the arguments, or they select no cell.
    """
    with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
        file = Path(folder) / "cells.json"
        asked = [*arguments, "--accelerator", "cpu", "--collect-only", "-q"]
        command = [sys.executable, "-m", "harness.slurm.matrix", str(file), *asked]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode or not file.exists():
            refusal = done.stderr.partition("ERROR: ")[2].strip()  # several lines, where a subject is broken
            said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise PlanError(f"pytest {' '.join(arguments)}: {refusal or next(iter(said), 'it ended')}")
        values = json.loads(file.read_text())
    if not values["cells"]:
        raise PlanError(f"pytest {' '.join(arguments)}: selects no cell")
    flags = tuple(word for word in arguments if word not in values["paths"])
    return Selection(tuple(Selected(**cell) for cell in values["cells"]), Path(values["reports"]), flags)


class _Collector:
    """A pytest plugin that writes down the cells which were selected."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_finish(self, session: Any) -> None:
        from harness.results.records import PlannedCell

        cells = []
        for item in session.items:
            planned = getattr(item, "callspec", None) and item.callspec.params.get("plumbline_cell")
            if planned:
                nodeid = f"{item.path}::{item.nodeid.partition('::')[2]}"
                described = PlannedCell.of(planned.cell, behavior=planned.behavior).model_dump(mode="json")
                cells.append({"cell": planned.cell.id, "nodeid": nodeid, "planned": described})
        config = session.config
        reports = Path(config.option.report_dir or config.rootpath / "reports").resolve()
        found = {"reports": str(reports), "paths": config.option.file_or_dir, "cells": cells}
        self._file.write_text(json.dumps(found))


def main(arguments: Sequence[str]) -> int:
    """Collect, and leave the cells in the file that is named first; return pytest's exit code."""
    import pytest

    return int(pytest.main([*arguments[1:]], plugins=[_Collector(Path(arguments[0]))]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
