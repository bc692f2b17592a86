"""``ci/accelerator``: run everything that needs an accelerator, in stages, and write a report about it.

    ci/accelerator                                    # a fresh machine: installs, then runs every stage
    ci/accelerator --python /opt/venv/bin/python      # nothing is downloaded: uses the torch of this interpreter
    ci/accelerator --python python3 --wheels DIR      # and installs the wheels in DIR first
    ci/accelerator --python python3 --accelerator xpu  # another type of device
    ci/accelerator --only doctor --only smoke
    ci/accelerator --minutes 9 --out DIR              # stops in time; DIR has report and archive after each stage
    ci/accelerator --minutes 9 --resume DIR/cuda-1x-nvidia-h200.tar.gz  # goes on, here or on another such machine
    ci/accelerator --dry-run                          # prints the stages, their commands and limits

Results, logs and runs are in reports/<type>-<machine>/, with the report beside it. A failure does not stop the lane.
Exit codes: 0 every stage passed; 1 some did not; 2 preparation failed, or wrong usage; 3 there is no device, and
nothing was run; 4 none failed so far, but some have not finished: use --resume; 130 interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelerator_lane.environment import CannotPrepare, Environment, prepare
from accelerator_lane.lane import Lane, unpack
from accelerator_lane.machine import ask_torch, describe, name_of, nvidia_gpus
from accelerator_lane.stage import DUE, PASSED, Stage, StageResult, shortest
from accelerator_lane.stages import TOTAL_S, stages

ROOT = Path(__file__).resolve().parents[2]

ALL_PASSED, SOME_DID_NOT, UNUSABLE, NO_DEVICE, SOME_ARE_DUE, INTERRUPTED = 0, 1, 2, 3, 4, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lane as the command line asks; return the exit code."""
    options = _options(arguments)
    unknown = set(options.only) - {stage.name for stage in stages(1)}
    if unknown:
        known = ", ".join(stage.name for stage in stages(1))
        return _refuse(f"there is no stage {', '.join(sorted(unknown))}; there are {known}")
    if options.dry_run:
        _say_what_would_run(stages(options.gpus or len(nvidia_gpus()) or 1), options.only)
        return ALL_PASSED
    if not nvidia_gpus() and not options.python:
        print("nvidia-smi shows no CUDA device, so nothing was run. For another type of device, name an interpreter")
        print("whose torch has it: --python PYTHON. On a machine with a CUDA device:\n")
        _say_what_would_run(stages(options.gpus or 1), options.only)
        return NO_DEVICE
    try:
        if options.python:  # before any file is written
            told = ask_torch(options.python, accelerator=options.accelerator)
            if not told.get("gpus"):
                return _no_device(told, options)
        environment = prepare(ROOT, options.python, options.wheels, print)
    except CannotPrepare as error:
        return _refuse(str(error))
    told = ask_torch(environment.python, environment.variables, options.accelerator)
    if not told.get("gpus"):
        return _no_device(told, options)
    return _run(options, environment, told)


def _run(options: argparse.Namespace, environment: Environment, told: Mapping[str, object]) -> int:
    accelerator = str(told["accelerator"])
    name = f"{accelerator}-{options.name or name_of(told)}"
    folder = ROOT / "reports" / name
    if isinstance(options.resume, Path):
        try:
            unpack(options.resume, folder)
        except (OSError, ValueError) as error:
            return _refuse(f"--resume {options.resume}: {error}")
    gpus, modules = told["gpus"], told.get("modules")
    assert isinstance(gpus, int)
    assert isinstance(modules, list)
    lane = Lane(
        name,
        stages(options.gpus or gpus, frozenset(modules), accelerator),
        folder,
        ROOT / "reports" / f"{name}.md",
        ROOT,
        environment.variables,
        describe(told, _commit()),
        environment.notes,
        options.out,
    )
    try:
        results = lane.run(options.minutes * 60, options.only, resume=options.resume is not None)
    except KeyboardInterrupt:
        print(f"Interrupted; {lane.report} has the results so far. Continue with --resume.")
        return INTERRUPTED
    print(f"report: {lane.report}")
    return code_of(results, options.only or [stage.name for stage in lane.stages])


def code_of(results: Mapping[str, StageResult], chosen: Sequence[str]) -> int:
    """Return the exit code for the results of the ``chosen`` stages."""
    outcomes = [results[name].outcome if name in results else DUE[-1] for name in chosen]
    if any(outcome != PASSED and outcome not in DUE for outcome in outcomes):
        return SOME_DID_NOT
    return SOME_ARE_DUE if any(outcome in DUE for outcome in outcomes) else ALL_PASSED


def _no_device(told: Mapping[str, object], options: argparse.Namespace) -> int:
    why = told.get("error") or f"torch {told.get('torch')}, built for CUDA {told.get('cuda')}, sees none"
    sought = "accelerator" if options.accelerator == "auto" else f"{options.accelerator} device"
    print(f"torch finds no {sought} ({why}), so nothing was run. On a machine with one:\n")
    _say_what_would_run(stages(options.gpus or 1), options.only)
    return NO_DEVICE


def _say_what_would_run(planned: Sequence[Stage], only: Sequence[str]) -> None:
    chosen = [stage for stage in planned if not only or stage.name in only]
    for stage in chosen:
        print(f"{stage.name}: {stage.why}; at most {stage.limit_s:.0f} s")
        print(f"    {shlex.join(shortest(stage.command).split())}")
    print(f"{len(chosen)} stages, {sum(stage.limit_s for stage in chosen) / 60:.0f} minutes at most.")


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def _refuse(why: str) -> int:
    print(f"ci/accelerator: {why}", file=sys.stderr)
    return UNUSABLE


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/accelerator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--python", metavar="PYTHON", help="interpreter whose torch has the devices; it is not changed")
    add("--accelerator", default="auto", metavar="TYPE", help="type of device (default: the one that torch has)")
    add("--wheels", type=Path, metavar="DIR", help="with --python: wheels to install without a package index")
    add("--only", action="append", default=[], metavar="STAGE", help="run only this stage (repeatable)")
    add("--minutes", type=float, default=TOTAL_S / 60, help="for all stages together (default: %(default).0f)")
    add(
        "--resume",
        nargs="?",
        const=True,
        type=Path,
        metavar="ARCHIVE",
        help="skip the stages that are complete, on this machine or in the archive",
    )
    add("--out", type=Path, metavar="DIR", help="copy the report and an archive for --resume there after each stage")
    add("--gpus", type=int, metavar="N", help="number of devices to use (default: all)")
    add("--name", metavar="NAME", help="the machine's name in the report (default: number and model of its GPUs)")
    add("--dry-run", action="store_true", help="print what would run, and exit")
    options = parser.parse_args(arguments)
    if options.wheels and not options.python:
        parser.error("--wheels goes with --python")
    return options
