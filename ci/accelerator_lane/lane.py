"""Runs stages in turn within a time budget, and saves each result as soon as it is known."""

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
"""No stage starts with less time than this."""

ARCHIVE_BYTES = 12 << 20
"""The approximate size of the archive: logs and results go in first, evidence last."""

_RESULTS, _MACHINE = "results.json", "machine.json"


@dataclass
class Lane:
    """Stages and where they run. ``folder`` has logs, results and the stages' own files; ``report`` is their page.

    After every stage, the report and an archive of ``folder`` are copied to ``out``, for machines that do not last.
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
        """Run the stages, or ``only`` some, for at most ``budget_s`` in total; return all results by name.

        With ``resume``, skip the stages that finished before, and continue one that was cut. A failure or a time limit
        ends only its own stage.
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
            result.outcome = TIMED_OUT  # the stage's own limit, over all continuations
        result.seconds += spent
        return result

    def results(self) -> dict[str, StageResult]:
        """Return the results of an earlier run of the lane, or an empty dict."""
        try:
            told = json.loads((self.folder / _RESULTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {name: StageResult(**values) for name, values in told.items()}

    def _write(self, results: Mapping[str, StageResult]) -> None:
        """Write results, report and, if requested, the archive; each file is replaced atomically."""
        told = json.dumps({name: result.to_json() for name, result in results.items()}, indent=1)
        _replace(self.folder / _RESULTS, told)
        _replace(self.folder / _MACHINE, json.dumps(dict(self.machine), indent=1))
        _replace(self.report, write_report(self.name, self.machine, self.notes, self.stages, results, self.folder))
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.report, self.out / self.report.name)
            pack(self.folder, self.out / f"{self.name}.tar.gz")


def pack(folder: Path, archive: Path, most: int = ARCHIVE_BYTES) -> None:
    """Write ``folder`` into an archive, small files first and evidence last, up to ``most`` bytes."""
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
    """Extract an archive that :func:`pack` wrote."""
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
