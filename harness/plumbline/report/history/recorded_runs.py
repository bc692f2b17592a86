"""The runs below a folder, oldest first, and what distinguishes one from another."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from plumbline.core.software import UNKNOWN, Software
from plumbline.results.errors import ResultsError, RunNotFound
from plumbline.results.header_footer import SubjectCode
from plumbline.results.run import RESULTS, Run, read_run

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
    code = header.code.get(subject, SubjectCode())
    found = {
        software.library or "library": software.version,
        "commit": _short(code.commit),
        "source": _short(code.sha256),
        **{f"source of workload {name}": _short(source.sha256) for name, source in header.workloads.items()},
        "torch": software.torch,
        "python": software.python,
        "seed": None if header.options.get("seed") is None else str(header.options["seed"]),
        "plumbline": header.plumbline,
        "plumbline's commit": _short(fingerprint.commit),
        "machine": machine,
        "cores": key.cpu_cores and str(key.cpu_cores),
        "driver": key.driver,
        "platform": fingerprint.platform,
        **fingerprint.environment,
    }
    every = {**fingerprint.packages, **found}  # a subject may have packages of its own, in another environment
    return {name: value for name in (*found, *fingerprint.packages) if (value := every[name])}


def own_code(run: Run, subject: str) -> str:
    """Return the commit of a subject's repository, or else the hash of its source; "" where neither is recorded."""
    code = run.header.code.get(subject, SubjectCode())
    return f"commit {_short(code.commit)}" if code.commit else f"source {_short(code.sha256)}" if code.sha256 else ""


def _short(version: str | None) -> str | None:
    """Return the first digits of a hash or a commit, with a word that follows it: ``0123456789-dirty``."""
    digits, _, word = (version or "").partition("-")
    return "-".join(filter(None, (digits[:10], word))) or None


def label(run: Run, subject: str) -> str:
    """Return what tells a subject's runs apart at a glance: the version of its library, or else of its own code."""
    library = run.header.subjects.get(subject, UNKNOWN).library
    known = traits(run, subject)
    names = (library,) if library not in (None, "torch") else ("commit", "source", "plumbline's commit")
    return next((f"{name} {known[name]}" for name in names if name in known), "")


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return what differs between two runs, in words: ``accelerate 1.14.0 → 1.15.0``."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name} {before.get(name, 'none')} → {after.get(name, 'none')}" for name in names]
