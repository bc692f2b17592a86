"""Tests training scripts published by others: every accusation must be true, and every mistake found and named.

    python ci/scripts_by_others.py                       # everything, into reports/scripts-by-others.md
    python ci/scripts_by_others.py --only nanogpt        # one subject, printed
    python ci/scripts_by_others.py --part mistakes --only no-zero-grad

Four scripts are rewritten with the structure of their originals (``ci/scripts_by_others/``), each with an adapter of
less than 30 lines. First the conformance suite runs on them as published. Every accusation must have a proof, which
also runs: a program of at most 30 lines that shows the mistake without Plumbline. Then mistakes are put into the
scripts, one at a time: the first finding must name the mistake, and everything else must be its consequence. Exits with
1 otherwise. Run it every night; it takes half an hour on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts_by_others"))

import torch
from accusations import PROOFS, Proof
from changes import MISTAKES, SCRIPTS, Mistake

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding, in_reading_order
from plumbline.core.numbers import counted
from plumbline.core.topology import Topology
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings
from plumbline.launch.pool import Pool
from plumbline.report.text import markdown, shortened
from plumbline.results.records import Result, ending
from plumbline.results.run import Run, read_run

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent / "scripts_by_others"
REPORT = ROOT / "reports" / "scripts-by-others.md"
ENDINGS = ("passed", "deviates", "known", "failed", "errored", "crashed", "timed_out")
LONGEST = 200


@dataclass(frozen=True)
class Accusation:
    """A root cause that a run found in a subject; ``known`` if a file of expectations lists it."""

    subject: str
    check: str
    cause: str | None
    known: bool

    @property
    def proof(self) -> Proof | None:
        """The program that proves it, or None."""
        return PROOFS.get((self.subject, self.cause or ""))


@dataclass(frozen=True)
class Tried:
    """The findings on one cell whose script has a mistake."""

    mistake: Mistake
    cell: str
    bad: tuple[Finding, ...]

    @property
    def companions(self) -> list[Finding]:
        """Findings beside the first that no other finding explains."""
        return [finding for finding in self.bad[1:] if finding.consequence_of is None]

    @property
    def is_right(self) -> bool:
        """Whether the first finding names the mistake, if there is one, without companions."""
        if not self.mistake.causes:
            return not self.bad
        return bool(self.bad) and self.bad[0].cause in self.mistake.causes and not self.companions


def main() -> int:
    """Run the selection, print it, and write the page if everything was selected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a part of a subject's or mistake's name")
    parser.add_argument("--part", choices=("published", "mistakes"), help="default: both")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--time-limit", type=float, default=60, help="seconds for one cell (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=REPORT)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines, said, right = [], [], True
    if asked.part != "mistakes":
        subjects = [name for name in SCRIPTS if not asked.only or any(word in name for word in asked.only)]
        section, proven = published(subjects, asked)
        lines += section
        right &= all(proven)
        said.append(f"{counted(len(proven), 'accusation')}, {sum(proven)} of them proven")
    if asked.part != "published":
        chosen = [one for one in MISTAKES if not asked.only or any(word in one.id for word in asked.only)]
        tried = list(injected(chosen, asked.time_limit))
        lines += mistakes_table(tried)
        said.append(f"mistakes named on {sum(one.is_right for one in tried)} of {counted(len(tried), 'cell')}")
        right &= all(one.is_right for one in tried)
    page = "\n".join(["# Scripts by others", "", INTRODUCTION, "", *lines, ""])
    print(page)
    if not asked.only and asked.part is None:
        asked.report.write_text(page, encoding="utf-8")
    print(f"In all: {'; '.join(said)}")
    return 0 if right else 1


INTRODUCTION = (
    f"Made by `python ci/scripts_by_others.py`: torch {torch.__version__.partition('+')[0]}, simulated devices. The "
    "scripts are rewritten with the structure of their originals, which each script names."
)


def published(subjects: Sequence[str], asked: argparse.Namespace) -> tuple[list[str], list[bool]]:
    """Run the conformance suite on the published scripts; return lines, and whether each accusation is proven."""
    lines = [
        "## As published",
        "",
        f"`pytest suites/ --gpus {asked.gpus} --backends ddp`. Cells by outcome, and all root causes.",
        "",
        f"| subject | adapter, lines | {' | '.join(name.replace('_', ' ') for name in ENDINGS)} |",
        f"| --- |{' --: |' * (len(ENDINGS) + 1)}",
    ]
    accusations: dict[Accusation, list[Result]] = {}
    for subject in subjects:
        with tempfile.TemporaryDirectory() as folder:
            run = conformance(subject, asked, Path(folder))
        ends = Counter(str(getattr(end, "value", end)) for end in (ending(results) for results in run.whole.values()))
        counts = " | ".join(str(ends.pop(name, 0)) for name in ENDINGS)
        ends.pop("unsupported", None)
        lines.append(f"| {subject} | {lines_of_code(adapter(subject))} | {counts} |")
        assert not ends, f"endings without a column: {ends}"
        print(lines[-1], file=sys.stderr, flush=True)
        for found, results in accused(subject, run).items():
            print(f"    {found.check}: {found.cause}, {counted(len(results), 'cell')}", file=sys.stderr, flush=True)
            accusations[found] = results
    told = [(one, results, one.proof.run() if one.proof else None) for one, results in accusations.items()]
    lines += [
        "",
        "### Accusations",
        "",
        "| subject | cause | cells | first finding | true? |",
        "| --- | --- | --: | --- | --- |",
    ]
    for one, results, printed in told:
        cause = f"{one.check}: {one.cause or 'no cause'}{', known' if one.known else ''}"
        truth = f"yes: {one.proof.because} (`{one.proof.file.name}`)" if one.proof and printed else "**not proven**"
        first = markdown(shortened(results[0].message.partition("\n")[0], LONGEST))
        lines.append(f"| {one.subject} | {cause} | {len(results)} | {first} | {truth} |")
    lines += ["", "### What the proofs print", ""]
    for file, printed in {one.proof.file: printed for one, _, printed in told if one.proof}.items():
        lines += [f"`{file.relative_to(ROOT)}`", "", "```", *(printed or "failed").splitlines(), "```", ""]
    return lines, [bool(printed) for _, _, printed in told]


def conformance(subject: str, asked: argparse.Namespace, folder: Path) -> Run:
    """Return the run of the suite on one subject."""
    command = [sys.executable, "-m", "pytest", "suites/", "-q", f"--gpus={asked.gpus}", "--backends=ddp"]
    command += [f"--subject={adapter(subject)}", f"--report-dir={folder}", f"--time-limit={asked.time_limit}"]
    subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    return read_run(folder / "latest")


def accused(subject: str, run: Run) -> dict[Accusation, list[Result]]:
    """Return a run's accusations: bad findings that no other finding explains."""
    found: dict[Accusation, list[Result]] = {}
    for results in run.whole.values():
        for result in results:
            if result.outcome.is_bad and result.consequence_of is None:
                known = result.expected is not None
                found.setdefault(Accusation(subject, result.check, result.cause, known), []).append(result)
    return found


def injected(mistakes: Iterable[Mistake], time_limit: float) -> Iterable[Tried]:
    """Train each script with a mistake on its cells, and judge it."""
    with closing(Pool(str(HERE / "changed.py"))) as pool:
        for mistake in mistakes:
            for cell in mistake.cells:
                yield tried_on(pool, mistake, cell, time_limit)


def tried_on(pool: Pool, mistake: Mistake, text: str, time_limit: float) -> Tried:
    """Train a script with a mistake on the cell that ``text`` names, and judge it."""
    workload, backend, topology, precision = text.split("/")
    cell = Cell(mistake.id, workload, backend, Topology.parse(topology), precision, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        findings = examine(pool, cell, Path(folder), Settings(time_limit)).findings
    return Tried(mistake, text, tuple(one for one in in_reading_order(findings) if one.outcome.is_bad))


def mistakes_table(tried: Sequence[Tried]) -> list[str]:
    """Return the page's lines about mistakes."""
    real = [one for one in tried if one.mistake.causes]
    names = sorted({one.mistake.name for one in real})
    named = [name for name in names if all(one.is_right for one in real if one.mistake.name == name)]
    lines = [
        "## Injected mistakes",
        "",
        f"Mistakes named by the first finding, with only its consequences beside it: {len(named)} of "
        f"{len(names)}, on {sum(one.is_right for one in real)} of {len(real)} cells.",
        "",
        "| mistake | subject | cell | first finding | consequences | other findings | as expected |",
        "| --- | --- | --- | --- | --- | --- | :-: |",
    ]
    for one in sorted(tried, key=lambda one: one.mistake.name):
        first = (
            f"{one.bad[0].check}: {one.bad[0].cause or one.bad[0].outcome.value}" if one.bad else "none: it is right"
        )
        after = ", ".join(finding.check for finding in one.bad[1:] if finding.consequence_of is not None)
        beside = ", ".join(f"{finding.check}: {finding.cause or finding.outcome.value}" for finding in one.companions)
        verdict = "yes" if one.is_right else "**NO**"
        cells = (one.mistake.name, one.mistake.subject, one.cell, first, after, beside, verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def adapter(subject: str) -> Path:
    """Return the file of a subject."""
    return HERE / f"{subject.replace('-', '_')}.py"


def lines_of_code(file: Path) -> int:
    """Return the number of non-empty lines in a file."""
    return sum(bool(line.strip()) for line in file.read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main())
