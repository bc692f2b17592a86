"""Injects real faults, and checks that Plumbline ends, reports what happened and leaves nothing behind.

    python ci/faults.py --report                # every fault, its table into reports/faults.md
    python ci/faults.py --times 1 --only hangs --only 2/
    python ci/faults.py --times 0 --only 8/killed --runs 100 --keep seen.jsonl --report
    python ci/faults.py --list

A fault is named by the number of its family and its name. ``--only`` takes a part of that; ``--quick`` selects the
faults that take a second or two. Exits with 1 if a required message was missing, or if anything was left behind. Linux
only; some faults need root.
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
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from fault_lane.bench import Bench
from fault_lane.cells import RIGHT, SUBJECTS
from fault_lane.deaths import OF_DEATHS
from fault_lane.fault import Fault, ImpossibleHereError, Shot, Tally
from fault_lane.files import OF_FILES
from fault_lane.kept import Kept
from fault_lane.left import MARK, Leftovers, Present, left_since
from fault_lane.memory import memory_group
from fault_lane.mounts import own_shared_memory
from fault_lane.page import page
from fault_lane.runs import OF_MACHINES
from fault_lane.soak import soak
from fault_lane.table import OF_RANKS

from plumbline.worker.processes import adopt, end_all
from plumbline.worker.scratch import RUN, Scratch

REPORT = Path(__file__).resolve().parent.parent / "reports" / "faults.md"
OF_RUNS = [*OF_DEATHS, *OF_MACHINES]
FAULTS: list[Fault] = sorted([*OF_RANKS, *OF_RUNS, *OF_FILES], key=lambda fault: fault.row)


def examine(fault: Fault, bench: Bench) -> Tally:
    """Inject a fault; pools that were warm before are not leftovers."""
    started, wrong, left = time.monotonic(), [], Leftovers()
    folder, before, pools = bench.folder(), Present.now(bench.temporary), bench.pools
    try:
        shot = fault.inject(bench, folder)
    except ImpossibleHereError as reason:
        return Tally(fault.row, fault.name, fault.must, 0, 0, left, 0.0, 0.0, skipped=str(reason))
    except Exception as error:
        shot = Shot(False, f"raised {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not shot.right:
        wrong.append(shot.seen)
    if bench.pools == pools:
        left = left_since(before, bench.temporary)
        if left.folders:
            wrong.append(f"left {sorted(Present.now(bench.temporary).folders - before.folders)}")
        end_all(before.processes)  # after they were counted
    seconds, load = time.monotonic() - started, os.getloadavg()[0]
    return Tally(fault.row, fault.name, fault.must, 1, int(shot.right), left, seconds, load, tuple(wrong))


def main(arguments: Sequence[str] | None = None) -> int:
    """Inject what was chosen, print and write the table, and return the exit code."""
    options = _options(arguments)
    chosen = [fault for fault in FAULTS if _is_chosen(fault, options)]
    if options.list:
        print(*(f"{fault.row}/{fault.name}: {fault.must}" for fault in chosen), sep="\n")
        return 0
    if not chosen and not options.soak and not options.keep:
        print("no fault has this name: see --list")
        return 2
    alone = own_shared_memory()
    # A background process may ignore SIGINT, and its children inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # On SIGTERM from a time limit, clean up as at a normal end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt()  # become the parent of orphans
    os.environ[MARK] = secrets.token_hex(8)
    torch.set_num_threads(1)
    kept, tallies, soaked = Kept(options.keep), [], None
    with _leaving_nothing() as root:
        temporary = root / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        with memory_group(), closing(Bench(temporary)) as bench:
            bench.warm_up([RIGHT, *(SUBJECTS / fault.file for fault in chosen if fault.file)])
            assert bench.untouched.is_whole
            for fault in chosen:
                for _ in range(options.runs if fault in OF_RUNS else options.times):
                    tallies.append(examine(fault, bench))
                    print(_line(tallies[-1]), flush=True)
                    kept.add(tallies[-1])
            if options.soak:
                soaked = soak(options.soak, temporary, lambda reading: print(reading, flush=True))
                kept.add(soaked)
    if options.report:
        told = page(kept.ordered((fault.row, fault.name) for fault in FAULTS), kept.soak, alone, _command(options))
        options.report.write_text(told, encoding="utf-8")
    injected = sum(tally.times for tally in tallies)
    print(f"In all: {injected} faults injected, {sum(tally.is_good for tally in tallies)} of them as promised")
    if soaked is not None:
        print(*soaked.alarms, f"longest launch {soaked.longest:.2f} s, {len(soaked.alarms)} alarms", sep="\n")
    good = not (soaked and soaked.alarms) and all(tally.is_good for tally in tallies)
    return 0 if good else 1


@contextmanager
def _leaving_nothing() -> Iterator[Path]:
    """Give this process a folder; at the end, remove it and kill all processes that were started meanwhile.

    If this process is killed, the next one removes the folder.
    """
    scratch = Scratch.new(RUN)
    try:
        yield Path(scratch.path)
    finally:
        end_all()
        scratch.leave(remove=True)


def _command(options: argparse.Namespace) -> str:
    if options.keep:
        return "`python ci/faults.py --keep FILE`, in several invocations"
    return f"`{' '.join(['python', 'ci/faults.py', *sys.argv[1:]])}`"


def _line(tally: Tally) -> str:
    if tally.skipped:
        return f"skip {tally.row}/{tally.name}: {tally.skipped}"
    said = f"{'ok  ' if tally.is_good else 'BAD '} {tally.row}/{tally.name}: left {tally.left}, {tally.seconds:.1f} s"
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
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add to the results in this file, and report all")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="also train a right cell N times in a row")
    parser.add_argument("--only", action="append", metavar="PART", help="faults with this in their names (repeatable)")
    parser.add_argument("--quick", action="store_true", help="only faults that take a second or two")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument(
        "--report", type=Path, nargs="?", const=REPORT, metavar="FILE", help=f"write the table: {REPORT.name}"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
