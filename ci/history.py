"""Tests old releases: one with a known mistake must fail, and a later one must pass.

    python ci/history.py                                # every line of ci/history/pairs.csv
    python ci/history.py --only 2694 --only lightning   # lines with one of these words
    python ci/history.py --library accelerate --bad 0.26.1 --good 1.0.1

A line has a library, a wrong version and a right one, the issue, a subject, one cell, and the expected family and cause
for the wrong version (any cause if the line has none). The right version must show only what ``suites/expectations``
lists. Both versions run the same subject on simulated devices, each in its own environment, which is created
once. Prints the table and writes it to ``--report``. Exits with 1 if anything is not as expected. Run it every night,
not for every change.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

from plumbline.core.cell import Cell
from plumbline.core.errors import SubjectError
from plumbline.core.finding import UNEXPLAINED, Finding, diagnosis
from plumbline.core.outcome import Outcome, worst
from plumbline.core.software import Software
from plumbline.core.topology import Topology
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings
from plumbline.launch.pool import Pool
from plumbline.planning.expectation_files import FOLDER, expected, known_of_subject, read_expectations
from plumbline.report.text import markdown, shortened

HERE = Path(__file__).resolve().parent / "history"
REPORT = Path(__file__).resolve().parent.parent / "reports" / "history.md"
EXPECTATIONS = Path(__file__).resolve().parent.parent / "suites" / FOLDER
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plumbline" / "history"

COMPANIONS = {
    "pytorch-lightning": ["setuptools<81"],  # the last with pkg_resources, which lightning needs up to 2.1
    "lightning": ["setuptools<81"],
    "transformers": ["accelerate"],
}
"""Packages that a library needs to train, but does not require."""

COLUMNS = ("library", "version", "issue", "cell", "expected", "outcome", "family", "cause", "as expected", "message")
LONGEST_MESSAGE = 240


@dataclass(frozen=True)
class Pair:
    """A line of the table: two versions of ``library``, one cell, and the finding expected for ``bad``."""

    library: str
    bad: str
    good: str
    issue: str
    subject: str
    cell: str
    family: str
    cause: str

    def convicts(self, finding: Finding) -> bool:
        """Whether a finding names this mistake."""
        named = finding.cause == self.cause if self.cause else finding.cause not in (None, UNEXPLAINED)
        return finding.outcome is Outcome.FAILED and finding.family == self.family and named


@dataclass(frozen=True)
class Verdict:
    """The result of one version of a pair; ``told`` is the main finding, or None if nothing was bad."""

    pair: Pair
    version: str
    outcome: Outcome
    told: Finding | None
    as_expected: bool

    @classmethod
    def of(cls, pair: Pair, version: str, findings: Sequence[Finding]) -> Verdict:
        """Compare the findings with what is expected of this version."""
        convicting = next(filter(pair.convicts, findings), None)
        told = convicting or diagnosis(findings)
        as_expected = convicting is not None if version == pair.bad else told is None
        return cls(pair, version, worst(finding.outcome for finding in findings), told, as_expected)

    def row(self) -> list[str]:
        """Return the line for the report, column by column."""
        told = self.told or Finding("", self.outcome, "")
        expected = f"{self.pair.family}: {self.pair.cause or 'any'}" if self.version == self.pair.bad else "passes"
        as_expected = "yes" if self.as_expected else "NO"
        return [
            *(self.pair.library, self.version, self.pair.issue, self.pair.cell, expected, self.outcome.value),
            *(told.family or "", told.cause or "", as_expected, shortened(told.message, LONGEST_MESSAGE)),
        ]


def main() -> int:
    """Examine both versions of each pair, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="examine only lines with this word (repeatable)")
    parser.add_argument("--library", help="examine only this library")
    for name in ("bad", "good", "subject", "cell", "family", "cause"):
        parser.add_argument(f"--{name}", help="overrides the line")
    parser.add_argument("--with", action="append", default=[], dest="companions", help="also install this (repeatable)")
    parser.add_argument("--torch", default=torch.__version__.partition("+")[0], help="default: %(default)s")
    parser.add_argument("--envs", type=Path, default=CACHE, help="where environments are kept (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=REPORT, help="where the table is written (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=120, help="seconds for one cell (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with (HERE / "pairs.csv").open(newline="") as lines:
        pairs = chosen([Pair(**line) for line in csv.DictReader(lines)], arguments)
    if not pairs:
        parser.error("no line of ci/history/pairs.csv matches: add one")
    verdicts = []
    for pair in pairs:
        for version in (pair.bad, pair.good):
            verdicts.append(verdict(pair, version, arguments))
            print(" | ".join(verdicts[-1].row()), flush=True)
    arguments.report.write_text(page(verdicts, arguments.torch))
    expected_ones = sum(verdict.as_expected for verdict in verdicts)
    print(f"In all: {len(verdicts)} releases, {expected_ones} of them judged as expected")
    return 0 if all(verdict.as_expected for verdict in verdicts) else 1


def chosen(pairs: Iterable[Pair], arguments: argparse.Namespace) -> list[Pair]:
    """Return the selected pairs, changed as the command line says."""
    told = {name: getattr(arguments, name) for name in ("bad", "good", "subject", "cell", "family", "cause")}
    changes = {name: value for name, value in told.items() if value is not None}
    if changes.keys() & {"cell", "family"}:
        changes = {"cause": "", **changes}  # the line's cause belongs to another mistake
    lines = [
        pair
        for pair in pairs
        if arguments.library in (None, pair.library)
        if not arguments.only or any(word in " ".join(astuple(pair)) for word in arguments.only)
    ]
    return list(dict.fromkeys(replace(pair, **changes, issue="") if changes else pair for pair in lines))


def verdict(pair: Pair, version: str, arguments: argparse.Namespace) -> Verdict:
    """Train one version of a pair and judge it; a version that cannot be installed or imported is errored."""
    try:
        python = installed(arguments.envs, pair.library, version, arguments.torch, arguments.companions)
        findings = examined(pair, python, arguments.time_limit, excused=version == pair.good)
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or [str(error)]
        findings = [Finding("launch", Outcome.ERRORED, f"cannot be installed: {' '.join(said)}")]
    except SubjectError as error:
        findings = [Finding("launch", Outcome.ERRORED, str(error))]
    return Verdict.of(pair, version, findings)


def examined(pair: Pair, python: Path, time_limit: float, *, excused: bool) -> Sequence[Finding]:
    """Return the findings of a pair's cell, trained by ``python``; with ``excused``, without expected ones."""
    workload, backend, topology, precision = pair.cell.rsplit("-", 3)
    devices = Topology.parse(topology)
    pool = Pool(str(HERE / pair.subject) if ".py" in pair.subject else pair.subject, str(python))
    try:
        cell = Cell(pool.subjects[0]["name"], workload, backend, devices, precision, "cpu")
        with tempfile.TemporaryDirectory() as folder:
            findings = examine(pool, cell, Path(folder), Settings(time_limit)).findings
        return unknown(cell, findings, Software(**pool.subjects[0]["software"])) if excused else findings
    finally:
        pool.close()


def unknown(cell: Cell, findings: Sequence[Finding], software: Software) -> list[Finding]:
    """Return the findings without known bad ones of this version."""
    known = known_of_subject(cell.subject, software, read_expectations(EXPECTATIONS))
    said = expected(cell, findings, known)
    return [finding for finding, one in zip(findings, said, strict=True) if one is None or not finding.outcome.is_bad]


def installed(envs: Path, library: str, version: str, torch_version: str, companions: Sequence[str]) -> Path:
    """Return an interpreter that has a version of a library, and of torch.

    torch, a gigabyte, is installed once: the libraries' environments see the packages in its environment.

    Raises:
        subprocess.CalledProcessError: pip cannot install them.
    """
    pinned = f"torch=={torch_version}"
    below = environment(envs / f"torch-{torch_version}", [pinned, "numpy"])
    wanted = [f"{library}=={version}", pinned, *COMPANIONS.get(library, ()), *companions]
    return environment(envs / f"{library}-{version}-torch-{torch_version}", wanted, below)


def environment(folder: Path, requirements: Sequence[str], below: Path | None = None) -> Path:
    """Return the interpreter of an environment with these requirements; create it unless it is complete."""
    python, whole = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join([*requirements, ""])
    if not whole.is_file() or whole.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", folder)
        if below is not None:
            (_packages(python) / "below.pth").write_text(f"{_packages(below)}\n")
        _run(python, "-m", "pip", "install", "--quiet", *requirements)
        whole.write_text(wanted)  # last, so that an interrupted installation does not count as complete
    return python


def _packages(python: Path) -> Path:
    return next(python.parent.parent.glob("lib/python*/site-packages"))


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def page(verdicts: Sequence[Verdict], torch_version: str) -> str:
    """Return the table as Markdown."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *([markdown(text) for text in verdict.row()] for verdict in verdicts)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    good = sum(verdict.as_expected for verdict in verdicts)
    return (
        "# Tests of old releases\n\nMade by `python ci/history.py`: torch "
        f"{torch_version}, simulated devices. As expected: {good} of {len(verdicts)}.\n\n{table}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
