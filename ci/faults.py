"""Injects faults for real, looks whether Plumbline ends, says what happened and leaves nothing behind, and counts.

    python ci/faults.py                         # every fault three times, into reports/faults.md
    python ci/faults.py --times 1 --only hangs --only 2/
    python ci/faults.py --list

A fault's name stands behind the number of its family: ``--only`` takes a part of that, and --quick what takes a second
or two. Exits with 1 if anything was not seen that must be, or anything was left behind. Linux; some faults need root.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from faults.cells import SUBJECTS, train
from faults.fault import Fault, ImpossibleHereError, Shot, Tally
from faults.files import OF_FILES
from faults.left import MARK, Leftovers, Present, end, left_since
from faults.memory import memory_group
from faults.mounts import own_shared_memory
from faults.page import page
from faults.runs import CELLS, OF_RUNS, Project
from faults.soak import soak
from faults.table import OF_RANKS

from harness.core.trace import Trace
from harness.launch.pool import Pool
from harness.worker.descendants import adopt

REPORT = Path(__file__).resolve().parent.parent / "reports" / "faults.md"
FAULTS: list[Fault] = sorted([*OF_RANKS, *OF_RUNS, *OF_FILES], key=lambda fault: fault.row)


class Bench:
    """The pools of a whole examination, and the folder it works in."""

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        self._pools: dict[Path, Pool] = {}
        self.untouched: Trace = Trace(())
        self._whole: Path | None = None

    def pool(self, file: Path) -> Pool:
        """Return the warm pool of a file of subjects; one that has died is replaced, as a session does."""
        pool = self._pools.get(file)
        if pool is None or not pool.alive:
            if pool is not None:
                pool.close()
            pool = self._pools[file] = Pool(str(file))
            assert pool.subjects
        return pool

    def train_untouched(self) -> None:
        """Train a right cell on a pool on which nothing has happened yet."""
        self.untouched = train(self.pool(SUBJECTS / "right.py"), "trains", self.temporary / "untouched").trace

    def whole_run(self, project: Project) -> bytes:
        """Let a project have a whole run, which is made once; return its results."""
        if self._whole is None:
            first = Project(self.temporary.parent / "whole")
            assert first.pytest(*CELLS).code == 0
            self._whole = first.reports
        shutil.copytree(self._whole, project.reports, symlinks=True)
        return (project.reports / "latest" / "results.jsonl").read_bytes()

    def close(self) -> None:
        """End every pool."""
        for pool in self._pools.values():
            pool.close()


def examine(fault: Fault, times: int, bench: Bench) -> Tally:
    """Inject a fault so many times; pools that are warm before it are no leftovers."""
    right, left, wrong, started = 0, Leftovers(), [], time.monotonic()
    what = (fault.row, fault.name, fault.must)
    for _ in range(times):
        folder = Path(tempfile.mkdtemp(prefix="fault-", dir=bench.temporary.parent))
        before = Present.now(bench.temporary)
        pools = len(bench._pools)
        try:
            shot = fault.inject(bench, folder)
        except ImpossibleHereError as reason:
            return Tally(*what, 0, 0, Leftovers(), 0.0, (), str(reason))
        except Exception as error:
            shot = Shot(False, f"raised {type(error).__name__}: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if len(bench._pools) == pools:
            found = left_since(before, bench.temporary)
            left += found
            if found.folders:
                wrong.append(f"left {sorted(Present.now(bench.temporary).folders - before.folders)}")
            end(before)
        right += shot.right
        if not shot.right:
            wrong.append(shot.seen)
    return Tally(*what, times, right, left, time.monotonic() - started, tuple(wrong))


def main(arguments: Sequence[str] | None = None) -> int:
    """Inject what was chosen, print and write the table, and return the exit code."""
    options = _options(arguments)
    chosen = [fault for fault in FAULTS if _is_chosen(fault, options)]
    if options.list:
        print(*(f"{fault.row}/{fault.name}: {fault.must}" for fault in chosen), sep="\n")
        return 0
    if not chosen and not options.soak:
        print("no fault has such a name: see --list")
        return 2
    alone = own_shared_memory()
    # Ended by a time limit it clears up as if it had come to its end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt()  # who loses its parent is ours to find
    os.environ[MARK] = secrets.token_hex(8)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="plumbline-faults-") as root:
        temporary = Path(root) / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        bench = Bench(temporary)
        with memory_group(), closing(bench):
            bench.train_untouched()
            for file in {SUBJECTS / fault.file for fault in chosen if fault.file}:
                bench.pool(file)
            tallies = []
            for fault in chosen:
                times = options.runs if fault in OF_RUNS else options.times
                tallies.append(examine(fault, times, bench))
                print(_line(tallies[-1]), flush=True)
                _keep(options.keep, tallies[-1].to_json())
            soaked = soak(options.soak, temporary, lambda reading: print(reading, flush=True)) if options.soak else None
    if options.report:
        kept = options.keep.read_text().splitlines() if options.keep else [tally.to_json() for tally in tallies]
        every: dict[tuple[int, str], Tally] = {}
        for tally in map(Tally.from_json, kept):
            place = tally.row, tally.name
            every[place] = every[place] + tally if place in every else tally
        told = page([every[place] for place in sorted(every, key=_place)], soaked, alone, _command())
        options.report.write_text(told, encoding="utf-8")
    if soaked is not None:
        print(*soaked.alarms, f"longest launch {soaked.longest:.2f} s, {len(soaked.alarms)} alarms", sep="\n")
    good = not (soaked and soaked.alarms) and all(tally.is_good for tally in tallies)
    return 0 if good else 1


def _keep(file: Path | None, line: str) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def _place(name: tuple[int, str]) -> int:
    """Return where a fault stands in the list of all."""
    return next((place for place, fault in enumerate(FAULTS) if (fault.row, fault.name) == name), len(FAULTS))


def _command() -> str:
    return " ".join(["python", "ci/faults.py", *sys.argv[1:]])


def _line(tally: Tally) -> str:
    if tally.skipped:
        return f"skip {tally.row}/{tally.name}: {tally.skipped}"
    said = f"{'ok  ' if tally.is_good else 'BAD '} {tally.row}/{tally.name}: {tally.right} of {tally.times} right, "
    said += f"left {tally.left}, {tally.seconds:.1f} s"
    return "\n       ".join([said, *tally.wrong])


def _is_chosen(fault: Fault, options: argparse.Namespace) -> bool:
    name = f"{fault.row}/{fault.name}"
    return (
        (options.runs if fault in OF_RUNS else options.times) > 0
        and (not options.only or any(part in name for part in options.only))
        and (fault.quick or not options.quick)
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, metavar="N", help="how often each is injected (default: 3)")
    parser.add_argument(
        "--runs", type=int, default=1, metavar="N", help="the same for faults of whole runs (default: 1)"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add to what is known, and report all of it")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="train a right cell N times in a row as well")
    parser.add_argument("--only", action="append", metavar="PART", help="faults with this in their names (repeatable)")
    parser.add_argument("--quick", action="store_true", help="only those that take a second or two")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument(
        "--report", type=Path, default=None, metavar="FILE", help=f"where the table goes: {REPORT.name}"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
