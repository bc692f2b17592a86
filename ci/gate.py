"""Tests what README claims, in a few minutes. `.ci/run` calls it between the linters and the tests.

    python ci/gate.py                              # every stage; a failure does not stop the others
    python ci/gate.py --list
    python ci/gate.py --only check --only torch

Stages:

- one for each entry of ``CLAIMS``: each backend is named on the command line, and at least one of its cells must be
  trained. A backend without a trained cell is a failure, even if pytest exits with 0.
- one for each released library of ``RELEASED``, in an environment of its own: ``plumbline smoke`` must be right, and an
  entry of its expected failures must occur. ``ci/released-constraints.txt`` pins the environment, which is created if
  it is missing, as by ``plumbline subjects install``. If there is a callback for the library, a right training with
  the callback must be RIGHT, and one with a mistake WRONG.
- ``check``: ``plumbline check`` on a right script and on the same script with a mistake.
- ``wheel``: the built wheel works in a project that has packages called ``harness``, ``suites`` and ``tests``.

Prints a table of the stages with their times. Exits with 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from released import in_own_environment, pinned
from torch_aborts import despite_aborts
from try_wheel import TryError
from try_wheel import check as check_both

from plumbline.core.outcome import Outcome
from plumbline.report.tables.cells import cell_table
from plumbline.results.records import KNOWN
from plumbline.results.run import read_run

ROOT = Path(__file__).resolve().parent.parent
PLUMBLINE = str(Path(sys.executable).with_name("plumbline"))

ON_MESHES = ("mlp", "lm-tokens", "transformer", "clipping-tied", "accumulation", "checkpoint-elastic")
OF_EVERY_KIND = (*ON_MESHES, "linear-exact", "cnn-batchnorm", "muon", "dropout", "experts", "clipping-experts")
"""Selected workloads: with all, torch's eight backends take a quarter of ``.ci/run``. ``ci/nightly`` trains all."""

TRAINED = (Outcome.PASSED, Outcome.DEVIATES)
"""Outcomes of cells that were trained and judged. Expected failures do not count, because a launch may fail."""


@dataclass(frozen=True)
class Claim:
    """A subject trains with each of these backends on ``gpus`` devices, with all workloads if none are named."""

    subject: str
    backends: tuple[str, ...]
    gpus: int
    workloads: tuple[str, ...] = ()


CLAIMS: Mapping[str, Claim] = {
    "reference": Claim("reference", ("none", "auto", "dp", "ddp", "balanced"), 2),
    "reference-on-nodes": Claim("reference", ("ddp2",), 4),
    "torch": Claim("torch", ("none", "ddp", "fsdp", "zero", "tp", "sp", "ep", "pp"), 2, OF_EVERY_KIND),
    "torch-on-meshes": Claim("torch", ("hsdp", "ddp+tp", "fsdp+tp"), 4, ON_MESHES),
    "torch-in-three-dimensions": Claim("torch", ("hsdp+tp",), 8, ("mlp", "transformer")),
}

RELEASED: Mapping[str, str] = {"lightning": "accumulation", "accelerate": "accumulation", "transformers": "uneven"}
"""Released libraries, each with a workload on which it is expected to fail."""

CALLBACKS: Mapping[str, Sequence[str]] = {
    "lightning": (),
    "transformers": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}
"""Released libraries with a callback, each with the command that starts its script on two ranks."""


class GateError(Exception):
    """A stage failed; the message says why."""


Stage = Callable[[], str]
"""Returns figures for the table, or raises ``GateError``."""


def stages() -> dict[str, Stage]:
    """Return every stage by name."""
    return {
        **{name: partial(hold, claim) for name, claim in CLAIMS.items()},
        **{name: partial(release, name, workload) for name, workload in RELEASED.items()},
        "check": check,
        "wheel": wheel,
    }


def hold(claim: Claim) -> str:
    """Train a claim's cells; each of its backends must have trained ones."""
    counts, _ = conformance(claim)
    return ", ".join(f"{backend} {count}" for backend, count in counts.items())


def release(name: str, workload: str) -> str:
    """Smoke-test a released library, then check that one of its expected failures occurs."""
    try:
        subject = in_own_environment(name)
    except subprocess.CalledProcessError as error:
        raise GateError(f"no environment for {name}: exit code {error.returncode}") from None
    run([PLUMBLINE, "smoke", subject])
    _, known = conformance(Claim(subject, ("ddp",), 2, ("mlp", workload)))
    if not known:
        raise GateError(f"no expected failure of {name} was met with the workload {workload}")
    if name in CALLBACKS:
        callback(name, subject.partition("python=")[2])
    return f"{pinned(name)}: smoke is right, {known} expected failure{'s' * (known > 1)}"


def callback(name: str, python: str) -> None:
    """Train with a library's callback: a right training, and one that never zeroes its gradients."""
    words = [python, *CALLBACKS[name], str(ROOT / "ci" / "callback_scripts" / f"with_{name}.py")]
    for more, headline in (([], "RIGHT: "), (["wrong"], "WRONG: gradients: previous step not zeroed")):
        ended = despite_aborts(partial(execute, [*words, *more], PYTHONPATH=str(ROOT / "harness")))
        if ended.code or headline not in ended.output:
            raise GateError(f"the callback of {name} does not say {headline} (exit code {ended.code})")


def conformance(claim: Claim) -> tuple[dict[str, int], int]:
    """Run the conformance suite; return each backend's trained cells, and the number of expected failures."""
    with tempfile.TemporaryDirectory(prefix="plumbline-gate-") as reports:
        options = ["--gpus", str(claim.gpus), "--backends", ",".join(claim.backends), "--precisions", "32"]
        options += ["--workloads", ",".join(claim.workloads)] if claim.workloads else []
        suite = [sys.executable, "-m", "pytest", "suites/conformance", "-q", "--accelerator", "cpu", *options]
        run([*suite, "--subject", claim.subject, "--report-dir", reports])
        cells = cell_table(read_run(Path(reports) / "latest"))
    trained = cells[cells["outcome"].isin(TRAINED)]
    counts = {backend: int((trained["backend"] == backend).sum()) for backend in claim.backends}
    if absent := [backend for backend, count in counts.items() if not count]:
        raise GateError(f"no cell was trained with {', '.join(absent)}")
    return counts, int((cells["outcome"] == KNOWN).sum())


def check() -> str:
    """Check a right script, and the same script with a mistake."""
    with tempfile.TemporaryDirectory(prefix="plumbline-gate-") as folder:
        try:
            check_both(PLUMBLINE, sys.executable, Path(folder))
        except TryError as error:
            raise GateError(str(error)) from None
    return "a right script is RIGHT, a wrong one WRONG"


def wheel() -> str:
    """Install the built wheel next to a project whose packages have the same names as ours."""
    output = run([sys.executable, "-m", "pytest", "tests/wheel/test_same_names.py", "-m", "", "-q", "-rx"])
    return output.splitlines()[-1]


def run(command: Sequence[str], *, code: int = 0, **environment: str) -> str:
    """Run a command in the checkout, with more environment variables; print and return its output.

    Raises:
        GateError: it did not exit with ``code``.
    """
    ended = execute(command, **environment)
    if ended.code != code:
        raise GateError(f"exit code {ended.code} instead of {code}: {shlex.join(command)}")
    return ended.output


@dataclass(frozen=True)
class Ended:
    """The exit status and the output of a command."""

    code: int
    output: str


def execute(command: Sequence[str], **environment: str) -> Ended:
    """Run a command like ``run``, whatever its exit status."""
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env=os.environ | environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return Ended(process.returncode, "".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected stages, and print their results."""
    every = stages()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(every), help="run only this stage (repeatable)")
    parser.add_argument("--list", action="store_true", help="print the names of the stages without running them")
    options = parser.parse_args(arguments)
    chosen = {name: stage for name, stage in every.items() if not options.only or name in options.only}
    if options.list:
        print("\n".join(chosen))
        return 0
    rows = []
    failed = False
    for name, stage in chosen.items():
        print(f"\n── {name}", flush=True)
        begun = time.monotonic()
        try:
            outcome = f"ok      {stage()}"
        except GateError as error:
            failed, outcome = True, f"FAILED  {error}"
        rows.append(f"{name:26} {time.monotonic() - begun:5.0f} s  {outcome}")
    bad = sum("  FAILED  " in row for row in rows)
    print("\nThe gate:", *rows, f"In all: {len(rows)} stages, {bad} failed", sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
