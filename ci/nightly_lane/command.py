"""``ci/nightly``: run everything that takes too long to run for every change: a superset of README's two commands.

    ci/nightly                          # all stages, piece by piece; a failure does not end the night
    ci/nightly --resume                 # those that have not passed
    ci/nightly --resume --minutes 60    # and begins no piece after an hour
    ci/nightly --list                   # each piece with its command
    ci/nightly --only tests --only "detection: meshes"
    ci/nightly --workers 8              # pytest processes of the first stages (default: 2)
    ci/nightly --checkouts FOLDER --python ENVIRONMENT/bin/python   # for ci/check_scripts.py, which describes them

`pytest tests/` skips tests marked `nightly`, and draws few examples of each property. Here, the stage `tests` runs
every test (clusters, hosts in namespaces, faults, browsers, installed environments) with many examples; `detection`
runs every known-bad and known-good trainer on each of its cells. If something is missing (a library, a browser, root,
CUDA), pieces skip what needs it or do not start; the table says so.

reports/nightly.md has the commit, the machine, and the outcome, figures and minutes of each piece. It is rewritten
after each piece, with reports/nightly.json, which --resume reads: commit both, and another machine can continue the
night. Logs are in reports/nightly/. A piece that passed stays passed at a later commit, unless that commit changed a
file that the piece has opened (ci/nightly_lane/reach.py). Results with uncommitted changes count for no commit. Five
hours on two cores; the programs have longer runs (docs/nightly-programs.md). Exit codes: 0 every selected piece passed
or is not possible here; 1 some failed; 2 wrong usage; 4 none failed, but some have not run: use --resume; 130
interrupted.
"""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from accelerator_lane.machine import ask_torch, describe

from nightly_lane.night import Night
from nightly_lane.piece import Piece
from nightly_lane.reach import changes_until
from nightly_lane.stages import pieces

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "reports" / "nightly"
REPORT = ROOT / "reports" / "nightly.md"

ALL_PASSED, SOME_FAILED, SOME_ARE_DUE, INTERRUPTED = 0, 1, 4, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected pieces; return the exit code."""
    parser, options = _options(arguments)
    scripts = [f"--checkouts={options.checkouts.resolve()}"] if options.checkouts else []
    scripts += [f"--python={path.absolute()}" for path in options.python]
    every = pieces(ROOT, options.workers, scripts)
    names = {name: None for piece in every for name in (piece.stage, piece.name)}
    if unknown := sorted(set(options.only) - set(names)):
        parser.error(f"there is no stage {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [piece for piece in every if not options.only or {piece.stage, piece.name} & set(options.only)]
    if options.list:
        for piece in chosen:
            print(f"{piece.name}\n    {shlex.join([Path(piece.command[0]).name, *piece.command[1:]])}")
        return ALL_PASSED
    commit, changed = _commit()
    machine = describe(ask_torch(sys.executable), None)
    night = Night(every, FOLDER, REPORT, ROOT, commit, machine, changed, changes_until(ROOT, commit))
    return run(night, chosen, options.minutes, resume=options.resume)


def run(night: Night, chosen: Sequence[Piece], minutes: float, *, resume: bool) -> int:
    """Run the selected pieces of a night; return the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        results = night.run(chosen, minutes, resume=resume)
    except KeyboardInterrupt:
        print("Interrupted. Continue with --resume.")
        return INTERRUPTED
    print(f"page: {night.report}")
    told = [results.get(piece.name) for piece in chosen]
    if any(result and result.has_failed for result in told):
        return SOME_FAILED
    return ALL_PASSED if all(result and night.holds(result) for result in told) else SOME_ARE_DUE


def _commit() -> tuple[str, bool]:
    """Return the last commit that changed more than reports, and whether there are other uncommitted changes."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!reports")
    return git("log", "-1", "--format=%h", "--", ".", ":!reports") or "unknown", bool(changes)


def _options(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="ci/nightly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="STAGE", help="run only this stage or piece (repeatable)")
    add("--resume", action="store_true", help="skip the pieces that have passed")
    add(
        "--minutes",
        type=float,
        default=math.inf,
        metavar="N",
        help="start no piece after N minutes (default: none)",
    )
    add("--list", action="store_true", help="print the pieces without running them")
    add("--workers", type=int, default=2, help="pytest processes of the first stages (default: 2)")
    add("--checkouts", type=Path, help="folder with the checkouts of the published scripts, for ci/check_scripts.py")
    add(
        "--python",
        type=Path,
        action="append",
        default=[],
        help="an interpreter with the packages of these scripts",
    )
    return parser, parser.parse_args(arguments)
