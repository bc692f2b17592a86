"""Runs pieces in turn, and writes down what became of each as soon as it is known, so that a night can be resumed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerator_lane.stage import PASSED

from nightly_lane.page import page
from nightly_lane.piece import Piece, Result, run
from nightly_lane.reach import Changes


@dataclass
class Night:
    """Pieces in their order, and where they run.

    ``folder`` keeps logs, ``report`` is the page, and the state is beside it. ``commit`` is that of the checkout
    ``root``; ``changed``: there are changes that are not committed, so that what passes says nothing of the commit.
    ``changes_since`` returns what has changed since an earlier commit, or None where nobody knows.
    """

    pieces: Sequence[Piece]
    folder: Path
    report: Path
    root: Path
    commit: str
    machine: Mapping[str, str]
    changed: bool = False
    changes_since: Callable[[str], Changes | None] = lambda _: None
    say: Callable[[str], None] = print

    @property
    def results_file(self) -> Path:
        """Where the results of all pieces are written down, for --resume."""
        return self.report.with_suffix(".json")

    @property
    def state(self) -> str:
        """What results are of."""
        return f"{self.commit} with changes" if self.changed else self.commit

    def run(self, chosen: Sequence[Piece], minutes: float, *, resume: bool = False) -> dict[str, Result]:
        """Run the chosen pieces, and begin none after ``minutes``; return what is known of all pieces by name.

        With ``resume``, those that have passed are left out. A failure ends its own piece alone.
        """
        end = time.monotonic() + 60 * minutes
        self.folder.mkdir(parents=True, exist_ok=True)
        results = self.results()
        due = [piece for piece in chosen if not (resume and self.has_passed(piece, results))]
        for piece in due:
            if not resume:
                results.pop(piece.name, None)
        self._write(results)
        for number, piece in enumerate(due):
            if time.monotonic() >= end:
                self.say(f"Time is up: {len(due) - number} pieces remain. Continue with --resume.")
                break
            self.say(f"{piece.name} …")
            results[piece.name] = told = run(piece, self.folder, self.root, self.state)
            self._write(results)
            self.say(f"{piece.name}: {told.outcome}, {told.seconds / 60:.1f} min {told.figures}".rstrip())
        return results

    def has_passed(self, piece: Piece, results: Mapping[str, Result]) -> bool:
        """Whether a piece is green at this commit. Nothing is where there are changes that are not committed."""
        result = results.get(piece.name)
        return result is not None and not self.changed and result.outcome == PASSED and self.holds(result)

    def holds(self, result: Result) -> bool:
        """Whether a result is of this commit, or of an earlier one that differs in nothing that the piece has read."""
        if self.changed or result.commit == self.commit:
            return result.commit == self.state
        changes = self.changes_since(result.commit)
        return changes is not None and result.read is not None and not changes.reach(result.read)

    def results(self) -> dict[str, Result]:
        """Return what was written down of the pieces that there are; empty where there is nothing."""
        try:
            told = json.loads(self.results_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        names = {piece.name for piece in self.pieces}
        return {name: Result(**values) for name, values in told.items() if name in names}

    def _write(self, results: Mapping[str, Result]) -> None:
        told = {name: result.to_json() for name, result in results.items()}
        _replace(self.results_file, json.dumps(told, indent=1) + "\n")
        here = {piece.name for piece in self.pieces if (r := results.get(piece.name)) and self.holds(r)}
        _replace(self.report, page(self.pieces, results, here, self.state, self.machine))


def _replace(path: Path, text: str) -> None:
    """Write a file that is whole at any moment."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
