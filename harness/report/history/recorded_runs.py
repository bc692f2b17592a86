"""The runs below a folder, oldest first, and what distinguishes one from another."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from harness.core.software import UNKNOWN, Software
from harness.results.errors import ResultsError, RunNotFound
from harness.results.run import RESULTS, Run, read_run

PAGE = "report.html"


@dataclass(frozen=True)
class FoundRuns:
    """Runs in the order in which they were started; ``unreadable`` has why others could not be read."""

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...] = ()


def find_runs(folder: Path) -> FoundRuns:
    """Return every run in ``folder`` or below it; one that lies there twice counts once.

    Raises:
        RunNotFound: there is none that can be read.
    """
    runs: dict[str, Run] = {}
    unreadable: list[str] = []
    for file in sorted(folder.glob(f"**/{RESULTS}")):
        if file.parent.is_symlink():
            continue
        try:
            run = read_run(file.parent)
        except ResultsError as error:
            unreadable.append(str(error))
        else:
            runs.setdefault(run.header.run_id, run)
    if not runs:
        raise RunNotFound(
            f"There is no run in {folder} or below it that can be read: name a folder of runs, for example reports."
            + "".join(f"\n{reason}" for reason in unreadable[:1])
        )
    return FoundRuns(tuple(sorted(runs.values(), key=lambda run: run.header.started)), tuple(unreadable))


def link_to(run: Run, site: Path, folder: Path) -> str | None:
    """Return the address of a run's page from the site's; None where it would lead out of ``folder``, or is not there.

    A site is copied as a whole: addresses are relative, and only lead where its folder goes along.
    """
    page = run.path / PAGE
    inside = site.resolve().is_relative_to(folder.resolve()) and page.is_relative_to(folder.resolve())
    return os.path.relpath(page, site.resolve()).replace(os.sep, "/") if inside and page.is_file() else None


def traits(run: Run, subject: str) -> dict[str, str]:
    """Return what may explain a change of one subject between two runs, by name, the version of its library first."""
    header, fingerprint = run.header, run.header.fingerprint
    key = fingerprint.key
    devices = f"{key.device_count} devices" if key.device_count else None
    machine = ", ".join(filter(None, [key.device, devices]))
    software = header.subjects.get(subject, Software(torch=fingerprint.torch, python=fingerprint.python))
    found = {
        software.library or "library": software.version,
        "torch": software.torch,
        "python": software.python,
        "commit": fingerprint.commit and fingerprint.commit[:10],
        "plumbline": header.plumbline,
        "machine": machine,
        "cores": key.cpu_cores and str(key.cpu_cores),
        "driver": key.driver,
        "seed": None if header.options.get("seed") is None else str(header.options["seed"]),
    }
    return {name: value for name, value in found.items() if value}


def label(run: Run, subject: str) -> str:
    """Return what tells a subject's runs apart at a glance: the version of its library, or else the commit."""
    library = run.header.subjects.get(subject, UNKNOWN).library
    name = library if library not in (None, "torch") else "commit"
    value = traits(run, subject).get(name)
    return f"{name} {value}" if value else ""


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return what differs between two runs, in words: ``accelerate 1.14.0 → 1.15.0``."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name} {before.get(name, 'none')} → {after.get(name, 'none')}" for name in names]
