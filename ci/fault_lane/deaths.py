"""Faults that end a run or its fork server early: kills, Ctrl-C, a loss of power. Each runs a real pytest."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_lane.cells import SUBJECTS
from fault_lane.fault import Shot
from fault_lane.left import Present, left_since
from fault_lane.project import CELLS, NO_END, Project, Said, cells_of, ended, fault, sentence, until_shown
from plumbline.worker.scratch import RUN, Scratch

AT_ONCE = 8.0
"""Seconds that count as immediate, compared with a cell's time limit of 120."""

_draw = random.SystemRandom()


def server_killed(bench: Any, folder: Path) -> Shot:
    """A rank kills the fork server twice: the cell is retried and errors, the report says so, and later cells train."""
    project = Project(folder)
    said = project.pytest(
        "--gpus", "2", "--workloads", "mlp", "--precisions", "32",
        "--subject", f"{SUBJECTS / 'dying.py'}::kills-the-server", "--subject", f"{SUBJECTS / 'dying.py'}::trains",
    )  # fmt: skip
    shot = sentence(said, "failed twice: the fork server of .* died", code=1)
    bad = {
        r["cell"]
        for r in project.run()
        if r["type"] == "result" and "trains-" in r["cell"] and r["outcome"] != "passed"
    }
    bad -= {cell for cell in bad if "-dp-" in cell}
    return shot if not bad else Shot(False, f"others suffered: {bad}")


def server_killed_once(bench: Any, folder: Path) -> Shot:
    """The fork server is killed once: the cell is retried and passes, and the report says so."""
    project = Project(folder)
    said = project.pytest(
        "--gpus", "2", "--workloads", "mlp", "--precisions", "32", "--backends", "ddp",
        "--subject", f"{SUBJECTS / 'dying.py'}::kills-the-server-once", PLUMBLINE_FAULTS_ONCE=str(folder / "once"),
    )  # fmt: skip
    told = [
        r
        for r in project.run()
        if r["type"] == "result" and "the first attempt failed: the fork server" in r["message"]
    ]
    return (
        sentence(said, "2 passed", code=0) if told else Shot(False, f"the report does not say so: {said.text[-500:]}")
    )


def interrupted(bench: Any, folder: Path) -> Shot:
    """Ctrl-C in the middle of a run ends it cleanly, with a partial report."""
    project = Project(folder)
    process = project.begin(*CELLS)
    text = until_shown(process, 2)
    os.killpg(process.pid, signal.SIGINT)
    said = ended(process, 30)
    said = Said(said.code, text + said.text)
    shot = sentence(said, "KeyboardInterrupt", "incomplete|not tried|missing", code=2)
    missing = said.shown - cells_of(project.run())
    table = (project.reports / "latest" / "support.md").is_file()
    return shot if not missing and table else Shot(False, f"shown but not in the results: {missing}; a table: {table}")


def interrupted_twice(bench: Any, folder: Path) -> Shot:
    """A second Ctrl-C at once ends the run within seconds."""
    project = Project(folder)
    process = project.begin(
        "--subject", str(SUBJECTS / "hanging.py"), "--gpus", "2", "--workloads", "mlp", "--precisions", "32"
    )
    until_shown(process, 1, "collected")
    time.sleep(1.0)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    said = ended(process, 30)
    took = time.monotonic() - began
    return Shot(
        said.code != NO_END and took < AT_ONCE,
        f"ended with exit code {said.code} after {took:.1f} s: {said.text[-300:] if took >= AT_ONCE else ''}",
    )


@dataclass
class Chain:
    """A run that is killed and resumed until it is complete.

    ``shown`` are the cells whose verdicts were printed, and ``known`` are the results at that time.
    """

    project: Project
    shown: set[str] = field(default_factory=set)
    known: list[dict[str, Any]] = field(default_factory=list)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The results on the disk."""
        return self.project.run() if (self.project.reports / "latest" / "results.jsonl").is_file() else []

    @property
    def is_over(self) -> bool:
        """Whether the run is complete; it may have been killed while its pages were written."""
        return bool(self.records) and self.records[-1]["type"] == "footer"

    def look(self, said: Said) -> str | None:
        """Return what is wrong after one more invocation, or None."""
        records = self.records
        self.shown |= said.shown
        if missing := self.shown - cells_of(records):
            return f"shown but not in the results: {missing}"
        results = [record for record in records if record["type"] == "result"]
        if lost := [record for record in self.known if record["cell"] in self.shown and record not in results]:
            return f"lost: {lost[0]}"
        if len(results) > len({(record["cell"], record["check"]) for record in results}):
            return "a cell is in the results twice"
        self.known = results
        if said.code != NO_END and (said.code or not self.is_over):
            return f"ended with {said.code}: {said.text[-600:]}"
        if self.is_over and {cell["cell"] for cell in records[0]["planned"]} != cells_of(records):
            return "the run is incomplete"
        return None


def killed(bench: Any, folder: Path) -> Shot:
    """The parent is killed at a random moment of a run. --resume continues, and is killed as well.

    A complete run must be whole; then a new one is started and killed.
    """
    before = Present.now(bench.temporary)
    while True:
        if bench.chain is None:
            bench.chain = Chain(Project(bench.folder()))
        chain = bench.chain
        moment = _draw.uniform(0.0, bench.seconds_of_a_run)
        process = chain.project.begin(*CELLS, *(["--resume"] if chain.records else []))
        said = ended(process, moment)
        wrong = chain.look(said)
        orphans = left_since(before, bench.temporary).processes
        Scratch.new(RUN, bench.temporary).leave(remove=True)  # as the next run does at its start
        if wrong or orphans:
            bench.chain = None
            return Shot(False, wrong or f"killed after {moment:.2f} s it left {orphans} processes")
        if chain.is_over:
            bench.chain = None
        if said.code == NO_END:
            return Shot(True, f"after {moment:.2f} s, {len(chain.shown)} cells shown")


def powerless(bench: Any, folder: Path) -> Shot:
    """The machine loses power: results may end anywhere, even within a character. --resume continues."""
    project = Project(folder)
    whole = bench.whole_run(project)
    file = project.reports / "latest" / "results.jsonl"
    first = whole.index(b"\n") + 1
    cut = random.SystemRandom().randrange(first, len(whole))
    file.write_bytes(whole[:cut])
    before = project.run()
    resumed = project.pytest(*CELLS, "--resume")
    after = project.run()
    lost = [r for r in before[:-1] if r["type"] == "result" and r["cell"] != before[-1].get("cell") and r not in after]
    good = resumed.code == 0 and after[-1]["type"] == "footer" and not lost
    return Shot(good, "goes on" if good else f"cut at {cut}, lost {lost[:1]}: {resumed.text[-600:]}")


OF_DEATHS = [
    fault(2, server_killed, "errored after two failures, with the reason; the next cells are trained"),
    fault(2, server_killed_once, "tried again, passed, and the report says why"),
    fault(8, killed, "--resume continues, no shown result is lost, no process is left"),
    fault(8, powerless, "--resume continues, a torn last line is recognised"),
    fault(9, interrupted, "exit code 2, partial report, no shown result is lost"),
    fault(9, interrupted_twice, f"an end within {AT_ONCE:.0f} s"),
]
