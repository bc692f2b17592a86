"""The failures that searches of one subject found, on disk, and where the next search continues."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from plumbline.core.cell import Cell
from plumbline.hunt.problems import Drawn, write_problem
from plumbline.hunt.search import Failure
from plumbline.results.files import write_text
from plumbline.workloads.generated import Recipe


@dataclass(frozen=True)
class Found:
    """A failure as it was found, with the finding's message."""

    cause: str
    drawn: Drawn
    message: str


class Corpus:
    """The folder of one subject's failures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found = folder / "found.jsonl"
        self._progress = folder / "progress.json"

    def add(self, failure: Failure) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        recipe, cell = failure.drawn.recipe, failure.drawn.cell
        locator = write_problem(recipe, self.folder, found=f": {failure.cause} on {cell.backend} {cell.topology}")
        told = {"message": failure.finding.message, "error_x_noise": failure.finding.error_x_noise}
        line = {"cause": failure.cause, "cell": asdict(cell), "recipe": asdict(recipe), **told}
        with self._found.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return Path(locator.partition("::")[0])

    def __iter__(self) -> Iterator[Found]:
        """Yield the failures in the order in which they were found."""
        if self._found.exists():
            for line in self._found.read_text("utf-8").splitlines():
                values = json.loads(line)
                recipe = Recipe(**{**values["recipe"], "layers": tuple(values["recipe"]["layers"])})
                yield Found(values["cause"], Drawn(recipe, Cell.from_json(values["cell"])), values["message"])

    @property
    def causes(self) -> set[str]:
        return {found.cause for found in self}

    @property
    def progress(self) -> Counter[str]:
        """Counts over all searches; ``rounds`` is the next seed."""
        return Counter(json.loads(self._progress.read_text("utf-8"))) if self._progress.exists() else Counter()

    def went_on(self, counts: Mapping[str, int]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self._progress, json.dumps(self.progress + Counter(counts), indent=1) + "\n")
