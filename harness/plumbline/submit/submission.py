"""A submission on disk: its tasks, and the engine that runs them. JSON, no pickle."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plumbline.core.errors import PlumblineError
from plumbline.results.atomic import point_symlink
from plumbline.results.run import LATEST
from plumbline.submit.engine import Engine
from plumbline.submit.engines import ENGINES
from plumbline.submit.select_cells import SelectedCell
from plumbline.submit.tasks import FOLDER, TaskCommand, Tasks


class NoSubmissionError(PlumblineError):
    """A run was not submitted, or its submission cannot be read."""


@dataclass(frozen=True)
class Submission(Tasks):
    """Tasks for one engine."""

    engine: Engine

    def save(self) -> None:
        """Write it to a new folder."""
        self.folder.mkdir(parents=True)
        point_symlink(self.run.parent / LATEST, self.run.name)
        engine = {"name": self.engine.name, **self.engine.settings()}
        values = {**asdict(self), "run": str(self.run), "engine": engine}
        (self.folder / "submission.json").write_text(json.dumps(values, indent=1))

    @classmethod
    def load(cls, run: Path) -> Submission:
        """Read what :meth:`save` wrote; ``run`` may be a link to the run's folder.

        Raises:
            NoSubmissionError: That run was not submitted, or its file is broken.
        """
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
