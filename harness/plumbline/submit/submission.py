"""Plans a submission from the user's request, and stores it as JSON. As a program, lists the cells of a pytest command.

``python -m plumbline.submit.submission FILE suites/ --gpus 8`` writes to FILE the cells that pytest selects with the
other arguments.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from plumbline.core.errors import PlanError, PlumblineError
from plumbline.core.invocation import SUITES, pytest_arguments, suites
from plumbline.planning.devices import check_accelerator
from plumbline.results.files import point_symlink
from plumbline.results.header_footer import new_run_id
from plumbline.results.run import LATEST
from plumbline.submit.engine import FOLDER, Engine, SelectedCell, TaskCommand, Tasks, split_cells
from plumbline.submit.engines import ENGINES


class NoSubmissionError(PlumblineError):
    """A run was not submitted, or its submission cannot be read."""


@dataclass(frozen=True)
class Submission(Tasks):
    """Tasks for one engine."""

    engine: Engine

    def save(self) -> None:
        self.folder.mkdir(parents=True)
        point_symlink(self.run.parent / LATEST, self.run.name)
        engine = {"name": self.engine.name, **self.engine.settings()}
        values = {**asdict(self), "run": str(self.run), "engine": engine}
        (self.folder / "submission.json").write_text(json.dumps(values, indent=1))

    @classmethod
    def load(cls, run: Path) -> Submission:
        """Read what ``save`` wrote, or raise ``NoSubmissionError``; ``run`` may be a link to the run's folder."""
        run = run.resolve()
        try:
            values = json.loads((run / FOLDER / "submission.json").read_text())
            engine = ENGINES[values["engine"].pop("name")]
            return cls(
                run,
                tuple(values["command"]),
                TaskCommand(**_with_tuples(values["work"])),
                tuple(SelectedCell(**cell) for cell in values["cells"]),
                tuple(map(tuple, values["tasks"])),
                engine(**_with_tuples(values["engine"])),
            )
        except FileNotFoundError as error:
            raise NoSubmissionError(f"{run} was not made by `plumbline submit`: choose a run that was") from error
        except (ValueError, LookupError, TypeError) as error:
            raise NoSubmissionError(f"{run / FOLDER / 'submission.json'} cannot be read: {error}") from error


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@dataclass(frozen=True)
class SubmitRequest:
    """The options of ``plumbline submit``: up to ``tasks`` tasks, on ``nodes`` nodes with ``gpus`` devices each."""

    engine: Engine
    nodes: int
    gpus: int
    tasks: int = 1
    accelerator: str = "auto"
    report_dir: Path | None = None
    pytest: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "tasks"):
            if getattr(self, name) < 1:
                raise PlanError(f"--{name.replace('tasks', 'array')} {getattr(self, name)}: must be at least 1")
        check_accelerator(self.accelerator)


def prepare(request: SubmitRequest, command: tuple[str, ...]) -> Submission:
    """Return the submission for a request, or raise ``PlanError``. Write nothing. ``command`` is the user's."""
    words = request.pytest
    if not words or words[0] in SUITES or words[0].startswith("-"):
        words = tuple(pytest_arguments(words))
    reports, given, cells = select_cells([*words, "--nodes", str(request.nodes), "--gpus", str(request.gpus)])
    run = (request.report_dir or reports).resolve() / new_run_id(datetime.now(timezone.utc))
    work = TaskCommand(
        nodes=request.nodes,
        gpus=request.gpus,
        accelerator=request.accelerator,
        **given,
        python=sys.executable,
        folder=str(Path.cwd()),
        suites=str(suites()),
    )
    tasks = split_cells([cell.cell for cell in cells], request.tasks)
    submission = Submission(run, command, work, cells, tasks, request.engine)
    request.engine.check(submission)
    return submission


def select_cells(arguments: Sequence[str]) -> tuple[Path, dict[str, tuple[str, ...]], tuple[SelectedCell, ...]]:
    """Return the report directory, flags and locators, and cells of ``pytest ARGUMENTS``, or raise ``PlanError``."""
    with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
        file = Path(folder) / "cells.json"
        collect = [*arguments, "--accelerator", "cpu", "--collect-only", "-q"]
        command = [sys.executable, "-m", "plumbline.submit.submission", str(file), *collect]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode or not file.exists():
            error = done.stderr.partition("ERROR: ")[2].strip()  # several lines if a subject is broken
            output = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise PlanError(f"pytest {' '.join(arguments)}: {error or next(iter(output), 'no output')}")
        values = json.loads(file.read_text())
    if not values["cells"]:
        raise PlanError(f"pytest {' '.join(arguments)}: these arguments select no cell")
    flags = tuple(word for word in arguments if word not in values["paths"])
    given = {"flags": flags, "subjects": tuple(values["subjects"]), "workloads": tuple(values["workloads"])}
    return Path(values["reports"]), given, tuple(SelectedCell(**cell) for cell in values["cells"])


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
    """Write the cells that pytest selects to the file named by the first argument; return pytest's exit code."""
    import pytest

    return int(pytest.main([*arguments[1:]], plugins=[_Collector(Path(arguments[0]))]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
