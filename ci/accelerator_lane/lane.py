"""Runs stages in turn within a budget of time, and writes down what became of each as soon as it is known."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerator_lane.report import write_report
from accelerator_lane.stage import CUT, DUE, TIMED_OUT, Stage, StageResult, run_stage

LEAST_S = 15.0
"""A stage is not begun with less time than this."""

ARCHIVE_BYTES = 12 << 20
"""About how much of what the stages wrote goes into the archive; logs and results first, evidence last."""

_RESULTS, _MACHINE = "results.json", "machine.json"


@dataclass
class Lane:
    """What is run where. ``folder`` keeps logs, results and the stages' own files; ``report`` is the page about them.

    ``out`` is a folder that is given the report and an archive of ``folder`` after every stage, for machines that do
    not last.
    """

    name: str
    stages: Sequence[Stage]
    folder: Path
    report: Path
    root: Path
    environment: Mapping[str, str]
    machine: Mapping[str, str]
    notes: Sequence[str] = ()
    out: Path | None = None
    say: Callable[[str], None] = print
    least_s: float = LEAST_S

    def run(self, budget_s: float, only: Iterable[str] = (), *, resume: bool = False) -> dict[str, StageResult]:
        """Run the stages, or ``only`` some, for at most ``budget_s`` altogether; return all results by name.

        With ``resume`` those that came to their end before are not run again, and one that was cut is continued.
        A stage's failure, or its limit, ends that stage alone.
        """
        end = time.monotonic() + budget_s
        self.folder.mkdir(parents=True, exist_ok=True)
        results = self.results() if resume else {}
        chosen = set(only) or {stage.name for stage in self.stages}
        try:
            for stage in self.stages:
                before = results.get(stage.name)
                if stage.name not in chosen or (before is not None and before.outcome not in DUE):
                    continue
                results[stage.name] = self._run_one(stage, before, end - time.monotonic(), results)
                self._write(results)
                told = results[stage.name]
                self.say(f"{stage.name}: {told.outcome}, {told.seconds:.0f} s {told.counts or ''}".rstrip())
        except KeyboardInterrupt:
            for one in results.values():
                one.outcome = CUT if one.outcome == "running" else one.outcome
            self._write(results)
            raise
        return results

    def _run_one(
        self, stage: Stage, before: StageResult | None, left_s: float, results: dict[str, StageResult]
    ) -> StageResult:
        spent = before.seconds if before else 0.0
        allowed = stage.limit_s - spent
        if before and allowed < self.least_s:
            before.outcome = TIMED_OUT
            return before
        if left_s < min(self.least_s, stage.limit_s):
            return before or StageResult(stage.name, "not reached", limit_s=stage.limit_s)
        place = self.folder / stage.name
        proceed = before is not None and stage.suite and any(place.glob("*/results.jsonl"))
        log = self.folder / f"{stage.name}.log"
        if before is None:
            log.unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)
        results[stage.name] = StageResult(stage.name, "running", seconds=spent, limit_s=stage.limit_s)
        self._write(results)
        self.say(f"{stage.name}: {stage.why} (at most {min(allowed, left_s):.0f} s)")
        result = run_stage(stage, place, log, self.environment, min(allowed, left_s), cwd=self.root, proceed=proceed)
        if result.outcome == CUT and left_s >= allowed:
            result.outcome = TIMED_OUT  # its own limit, over all continuations
        result.seconds += spent
        return result

    def results(self) -> dict[str, StageResult]:
        """Return what was written down by an earlier run of the lane; empty where there is nothing."""
        try:
            told = json.loads((self.folder / _RESULTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {name: StageResult(**values) for name, values in told.items()}

    def _write(self, results: Mapping[str, StageResult]) -> None:
        """Write results, report and, where asked for, the archive; each file is whole at any moment."""
        told = json.dumps({name: result.to_json() for name, result in results.items()}, indent=1)
        _replace(self.folder / _RESULTS, told)
        _replace(self.folder / _MACHINE, json.dumps(dict(self.machine), indent=1))
        _replace(self.report, write_report(self.name, self.machine, self.notes, self.stages, results, self.folder))
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.report, self.out / self.report.name)
            pack(self.folder, self.out / f"{self.name}.tar.gz")


def pack(folder: Path, archive: Path, most: int = ARCHIVE_BYTES) -> None:
    """Write ``folder`` into an archive: small files first and evidence last, until it holds ``most`` bytes."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    files = [path for path in files if not any(part.is_symlink() for part in path.parents)]
    files.sort(key=lambda path: ("traces" in path.parts, path.suffix == ".html", path.stat().st_size))
    unfinished = archive.with_name(f".{archive.name}.{os.getpid()}")
    with tarfile.open(unfinished, "w:gz") as packed:
        for path in files:
            if packed.offset and unfinished.stat().st_size > most:
                break
            packed.add(path, arcname=str(path.relative_to(folder)))
    os.replace(unfinished, archive)


def unpack(archive: Path, folder: Path) -> None:
    """Put back what :func:`pack` wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            place = (folder / member.name).resolve()
            if not member.isfile() or not place.is_relative_to(folder.resolve()):
                raise ValueError(f"{archive} is not an archive of the lane: it holds {member.name}")
        packed.extractall(folder)


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
