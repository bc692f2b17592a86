"""Finds the cells that a pytest command selects: a separate process collects them.

That process runs this module: ``python -m plumbline.submit.select_cells FILE suites/ --gpus 8`` writes the cells.
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

from plumbline.core.errors import PlanError


@dataclass(frozen=True)
class SelectedCell:
    """A selected cell: its id, its pytest node id (with an absolute path), and its :class:`PlannedCell` as JSON."""

    cell: str
    nodeid: str
    planned: dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """The cells that a pytest command selects, in order.

    ``reports`` is the report directory, ``flags`` are the command's arguments without paths, ``subjects`` and
    ``workloads`` the values of ``--subject`` and ``--workload``.
    """

    cells: tuple[SelectedCell, ...]
    reports: Path
    flags: tuple[str, ...]
    subjects: tuple[str, ...]
    workloads: tuple[str, ...]


def select_cells(arguments: Sequence[str]) -> Selection:
    """Return the cells that ``pytest ARGUMENTS`` would examine; raise ``PlanError`` where there are none.

    They are planned for simulated devices, because the machine that submits may have no GPUs. Nothing is trained.
    """
    with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
        file = Path(folder) / "cells.json"
        collect = [*arguments, "--accelerator", "cpu", "--collect-only", "-q"]
        command = [sys.executable, "-m", "plumbline.submit.select_cells", str(file), *collect]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode or not file.exists():
            error = done.stderr.partition("ERROR: ")[2].strip()  # several lines, where a subject is broken
            output = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise PlanError(f"pytest {' '.join(arguments)}: {error or next(iter(output), 'no output')}")
        values = json.loads(file.read_text())
    if not values["cells"]:
        raise PlanError(f"pytest {' '.join(arguments)}: these arguments select no cell")
    flags = tuple(word for word in arguments if word not in values["paths"])
    cells = tuple(SelectedCell(**cell) for cell in values["cells"])
    return Selection(cells, Path(values["reports"]), flags, tuple(values["subjects"]), tuple(values["workloads"]))


class _Collector:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_finish(self, session: Any) -> None:
        from plumbline.results.records import PlannedCell

        cells = []
        for item in session.items:
            planned = getattr(item, "callspec", None) and item.callspec.params.get("plumbline_cell")
            if planned:
                nodeid = f"{item.path}::{item.nodeid.partition('::')[2]}"
                described = PlannedCell.of(planned.cell, behavior=planned.behavior).model_dump(mode="json")
                cells.append({"cell": planned.cell.id, "nodeid": nodeid, "planned": described})
        config = session.config
        reports = Path(config.option.report_dir or config.rootpath / "reports").resolve()
        option = config.option
        locators = {"subjects": option.subject or ["reference"], "workloads": option.workload or []}
        found = {"reports": str(reports), "paths": option.file_or_dir, "cells": cells, **locators}
        self._file.write_text(json.dumps(found))


def main(arguments: Sequence[str]) -> int:
    """Write the selected cells to the file that is the first argument; return pytest's exit code."""
    import pytest

    return int(pytest.main([*arguments[1:]], plugins=[_Collector(Path(arguments[0]))]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
