"""Measures the cost of following a long training, and how soon a mistake that begins in the middle is found.

    python ci/bench_following.py --checkouts FOLDER                     # nanoGPT, 20,000 steps, 3 rounds
    python ci/bench_following.py --checkouts FOLDER --steps 4000 --every 200 --rounds 2
    python ci/bench_following.py --checkouts FOLDER --size readme --side-by-side       # steps of 90 ms

Trains nanoGPT, whose checkout is described in ``ci/check_scripts.py``, plainly and under ``plumbline check --every N``
in turns, so other work on the machine affects both. With ``--side-by-side`` both train at the same time, each on a core
of its own; they exchange the cores after each round. Then it trains once with each mistake of ``MISTAKES``, which
begins in the middle of a window, in the middle of the training.
Writes ``reports/following.md``. Exits with 1 if the next window does not find the mistake.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "check_scripts"))

from published import PUBLISHED
from running import Placed, Ran, interpreter, prepare
from script import Script
from verdict import read_verdict

REPORT = Path(__file__).parents[1] / "reports" / "following.md"

NANOGPT = next(one for one in PUBLISHED if one.name == "nanogpt")

MISTAKES = {
    "gradients are not zeroed": (
        r"(?m)^( *)optimizer\.zero_grad\(set_to_none=True\)",
        r"\1if iter_num < {begin}: optimizer.zero_grad(set_to_none=True)",
    ),
}
"""Mistakes that start at an iteration: a pattern in ``train.py`` and its replacement."""

SIZES = {"small": (2, 2, 128, 4, 32), "readme": (4, 4, 128, 12, 64)}
"""nanoGPT's layers, heads, width, rows and length. ``readme`` is the configuration for CPUs in its README."""

_HEAD = """# A long training that is followed

nanoGPT ({layers} layers, {width} wide, batches of {rows} × {length}), {steps:,} optimizer steps on one process:
`{command}`, {cores} cores,
load average {load:.1f} at the end, {arranged}.
`check --every {every}` recorded the first {first} steps and one step in {every:,}, and judged them beside the training.

| | median, s | range, s |
|---|--:|--:|
"""


def main() -> int:
    """Measure, and look for the mistakes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder with the checkout of nanoGPT")
    parser.add_argument("--python", action="append", default=[], help="an interpreter with more packages")
    parser.add_argument("--steps", type=int, default=20_000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1000, help="steps between windows (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model (default: %(default)s)")
    parser.add_argument("--side-by-side", action="store_true", help="train both at once, each on its own core")
    parser.add_argument("--report", type=Path, default=REPORT, metavar="FILE", help="where the table goes")
    asked = parser.parse_args()
    plain, followed, ended = [], [], []
    with tempfile.TemporaryDirectory(prefix="plumbline-following-") as folder:
        placed = placed_in(Path(folder) / "right", nanogpt(asked), asked)
        for number in range(asked.rounds):
            alone, judged = pair(placed, asked, number)
            plain.append(alone.seconds)
            ended.append(judged)
            followed.append(judged.seconds)
            print(f"plain {plain[-1]:.1f} s, followed {followed[-1]:.1f} s: {headline(ended[-1])}", flush=True)
        begin = asked.steps // 2 // asked.every * asked.every + asked.every // 2
        found = {}
        for name, (pattern, text) in MISTAKES.items():
            script = nanogpt(asked, (("train.py", pattern, text.format(begin=begin)),))
            ran = follow(placed_in(Path(folder) / name, script, asked), asked)
            found[name] = ran
            print(f"{name} from step {begin} on: {headline(ran)}", flush=True)
    due = f"first wrong at step {-(-begin // asked.every) * asked.every}"
    is_found = {name: headline(ran).startswith("wrong") and due in headline(ran) for name, ran in found.items()}
    ratios = [b / a for a, b in zip(plain, followed, strict=True)]
    layers, _, width, rows, length = SIZES[asked.size]
    command = " ".join(["python", "ci/bench_following.py", *map(shown, sys.argv[1:])])
    told = [
        _HEAD.format(
            command=command,
            cores=os.cpu_count(),
            load=os.getloadavg()[0],
            steps=asked.steps,
            every=asked.every,
            first=4,
            arranged="both at once, each on its own core" if asked.side_by_side else "both in turns",
            layers=layers,
            width=width,
            rows=rows,
            length=length,
        ).rstrip("\n"),
        *(row(what, times, ".1f") for what, times in (("plain", plain), ("followed", followed))),
        row("followed ÷ plain, round by round", ratios, ".3f"),
        "",
        f"Verdict on the right training: {headline(ended[-1])}.",
        "",
        f"A mistake begins at step {begin:,}; the next window is at step {-(-begin // asked.every) * asked.every:,}.",
        "",
        "| mistake | verdict |",
        "|---|---|",
        *(f"| {name} | {headline(ran)} |" for name, ran in found.items()),
    ]
    asked.report.write_text("\n".join(told) + "\n", encoding="utf-8")
    print(f"In all: × {statistics.median(ratios):.3f}; {sum(is_found.values())} of {len(is_found)} mistakes found")
    return int(not all(is_found.values()))


def nanogpt(asked: argparse.Namespace, changes: tuple[tuple[str, str, str], ...] = ()) -> Script:
    """Return nanoGPT in the given size and number of steps, with one micro-batch and further changes."""
    command = re.sub(r"--max_iters=\d+", f"--max_iters={asked.steps}", NANOGPT.command)
    command = re.sub(r"--gradient_accumulation_steps=\d+", "--gradient_accumulation_steps=1", command)
    for name, value in zip(("n_layer", "n_head", "n_embd", "batch_size", "block_size"), SIZES[asked.size], strict=True):
        command = re.sub(rf"--{name}=\d+", f"--{name}={value}", command)
    command = re.sub(r"--eval_interval=\d+", f"--eval_interval={10 * asked.steps}", command)
    return replace(NANOGPT, command=f"{command} --log_interval=1000", changes=(*NANOGPT.changes, *changes))


def placed_in(folder: Path, script: Script, asked: argparse.Namespace) -> Placed:
    """Copy the script into a folder."""
    folder.mkdir()
    return prepare(script, folder, asked.checkouts, interpreter(script, (sys.executable, *asked.python)), 3600)


def pair(placed: Placed, asked: argparse.Namespace, number: int) -> tuple[Ran, Ran]:
    """Run the script plainly and followed, in turns or side by side."""
    kinds: tuple[Callable[[], Ran], ...] = (placed.run, lambda: follow(placed, asked))
    if not asked.side_by_side:
        return succeeded(kinds[0]()), succeeded(kinds[1]())
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("--side-by-side needs two cores")

    def on_core(kind: Callable[[], Ran], core: int) -> Ran:
        # A thread has its own affinity; the processes that it starts inherit it.
        os.sched_setaffinity(0, {core})
        return kind()

    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(on_core, kind, cores[(place + number) % 2]) for place, kind in enumerate(kinds)]
        return succeeded(runs[0].result()), succeeded(runs[1].result())


def follow(placed: Placed, asked: argparse.Namespace) -> Ran:
    """Run the script under ``check --every``; return the run with its verdict."""
    file = placed.folder / "verdict.json"
    command = (str(Path(sys.executable).with_name("plumbline")), "check", "--every", str(asked.every))
    ran = placed.run((*command, "--json", str(file), "--"))
    return replace(ran, verdict=read_verdict(file))


def succeeded(ran: Ran) -> Ran:
    """Return a run, which must have succeeded."""
    if ran.code:
        raise SystemExit(f"exit code {ran.code}\n{ran.output[-2000:]}")
    return ran


def headline(ran: Ran) -> str:
    """Return the verdict of a run and its reason."""
    return f"{ran.verdict.answer}: {ran.verdict.sentence}" if ran.verdict else f"none: exit code {ran.code}"


def row(what: str, values: list[float], form: str) -> str:
    """Return a row of the table."""
    return f"| {what} | {statistics.median(values):{form}} | {min(values):{form}} – {max(values):{form}} |"


def shown(word: str) -> str:
    """Return an argument of the command line without this machine's folders."""
    return Path(word).name if word.startswith("/") else word


if __name__ == "__main__":
    sys.exit(main())
