"""Runs pieces in turn, and saves each result as soon as it is known, so that a night can be resumed."""

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
    """The pieces in order, and where they run.

    ``folder`` has the logs, ``report`` is the page, and the state is beside it. ``commit`` is the commit of the
    checkout ``root``; ``changed``: there are uncommitted changes, so results say nothing about the commit.
    ``changes_since`` returns the changes since an earlier commit, or None if they are unknown.
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
        """The file with the results of all pieces, for --resume."""
        return self.report.with_suffix(".json")

    @property
    def state(self) -> str:
        """The commit and state that results belong to."""
        return f"{self.commit} with changes" if self.changed else self.commit

    def run(self, chosen: Sequence[Piece], minutes: float, *, resume: bool = False) -> dict[str, Result]:
        """Run the selected pieces, and start none after ``minutes``; return the results of all pieces by name.

        With ``resume``, skip pieces that have passed. A failure ends only its own piece.
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
        """Whether a piece is green at this commit. With uncommitted changes, no piece is."""
        result = results.get(piece.name)
        return result is not None and not self.changed and result.outcome == PASSED and self.holds(result)

    def holds(self, result: Result) -> bool:
        """Whether a result is from this commit, or from one with the same contents of all files that the piece read."""
        if self.changed or result.commit == self.commit:
            return result.commit == self.state
        changes = self.changes_since(result.commit)
        return changes is not None and result.read is not None and not changes.reach(result.read)

    def results(self) -> dict[str, Result]:
        """Return the saved results of the existing pieces, or an empty dict."""
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
    """Write a file atomically."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
