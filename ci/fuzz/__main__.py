"""Coverage-guided fuzzing of everything that parses (needs atheris: ``pip install -e '.[fuzz]'``).

    python ci/fuzz                      # every target, 100000 inputs each, at most ten minutes, into reports/fuzz.md
    python ci/fuzz --only trace --inputs 2000 --report fuzz.md

Prints a table with the number of inputs of each target, and of crashes: inputs with an answer that is not allowed.
Crashing inputs are kept, and their files are named. Exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

NAMES = (
    *("gpus", "hosts", "subject", "names", "resume", "results", "results-behind-checksums"),
    *("trace", "trace-behind-checksum", "expectations", "events", "greeting", "command-channel"),
)
REPORT = Path(__file__).resolve().parents[2] / "reports" / "fuzz.md"

_HEAD = """# Fuzzing

Fuzzing of everything that parses: {command}, coverage-guided (atheris), Python {python}, {cores} cores.
Each target starts from valid inputs. The fuzzer mutates them, guided by coverage, until it reaches the requested number
or the time limit. A *crash* is an answer other than a value or a refusal with a message, an answer after more than
20 s, or changed evidence that passed. Crashes stay in the table after they are fixed.

| target | what is parsed | inputs | s | edges covered | crashes | what was found |
|---|---|--:|--:|--:|--:|---|
"""


@dataclass(frozen=True)
class Row:
    """The results of one target. ``found`` has the answers to inputs that ended an invocation."""

    target: str
    what: str
    inputs: int
    seconds: float
    edges: int
    found: tuple[str, ...] = ()

    def __add__(self, later: Row) -> Row:
        """Return the sum of both; what was found stays."""
        return replace(
            later,
            inputs=self.inputs + later.inputs,
            seconds=self.seconds + later.seconds,
            edges=max(self.edges, later.edges),
            found=(*self.found, *later.found),
        )

    def __str__(self) -> str:
        said = "; ".join(self.found).replace("|", "\\|") or "nothing"
        figures = (self.inputs, f"{self.seconds:.0f}", self.edges, len(self.found), said)
        return "| " + " | ".join(map(str, (self.target, self.what, *figures))) + " |"


def main() -> int:
    """Fuzz each target in its own process, because the fuzzer ends its process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NAMES, action="append", help="a target (repeatable)")
    parser.add_argument("--inputs", type=int, default=100_000, help="for each target (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=600, help="time limit for each target (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=REPORT, metavar="FILE", help="where the table goes")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add to the results in this file, and report all")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        fuzz(options.inside, options.inputs, options.seconds)
    rows: dict[str, Row] = {}
    for line in options.keep.read_text().splitlines() if options.keep and options.keep.exists() else ():
        known = json.loads(line)
        _add(rows, Row(**{**known, "found": tuple(known["found"])}))
    bad = 0
    for name in options.only or NAMES:
        row = fuzzed(name, options.inputs, options.seconds)
        print(row, flush=True)
        bad += len(row.found)
        _add(rows, row)
        if options.keep:
            with options.keep.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(row)) + "\n")
    command = f"`{' '.join(['python', 'ci/fuzz', *sys.argv[1:]])}`"
    if options.keep:
        command = f"`python ci/fuzz --inputs {options.inputs} --keep FILE`, in several invocations"
    told = [_HEAD.format(command=command, python=platform.python_version(), cores=os.cpu_count()).rstrip("\n")]
    told += [str(rows[name]) for name in NAMES if name in rows]
    inputs, crashes = sum(row.inputs for row in rows.values()), sum(len(row.found) for row in rows.values())
    said = f"{inputs} inputs to {len(rows)} targets, {crashes} crashes"
    told += ["", f"In all {said}."]
    print(f"In all: {said}")
    options.report.write_text("\n".join(told) + "\n", encoding="utf-8")
    return 1 if bad else 0


def _add(rows: dict[str, Row], row: Row) -> None:
    rows[row.target] = rows[row.target] + row if row.target in rows else row


def fuzzed(name: str, inputs: int, seconds: int) -> Row:
    """Fuzz one target in its own process and folder; the folder stays if something was found."""
    place = Path(tempfile.mkdtemp(prefix=f"plumbline-fuzz-{name}-"))
    started = time.monotonic()
    command = [sys.executable, __file__, "--inside", name, f"--inputs={inputs}", f"--seconds={seconds}"]
    # libFuzzer ends the process without exit handlers, so temporary files must be in the folder.
    environment = os.environ | {"TMPDIR": str(place)}
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, errors="replace")
    given = re.findall(r"^(?:#|Done )(\d+)\s", ended.stderr, re.MULTILINE)
    covered = re.findall(r"cov: (\d+)", ended.stderr)
    found: tuple[str, ...] = ()
    if ended.returncode:
        said = re.findall(r"^\w*(?:Error|Exception|Interrupt)\b.*", ended.stdout + ended.stderr, re.MULTILINE)
        found = ((said or [f"exit code {ended.returncode}"])[-1][:120],)
        kept = ", ".join(str(file) for file in place.iterdir() if file.is_file()) or "no input was kept"
        print(f"{name}: {kept}\n{ended.stdout[-2000:]}{ended.stderr[-1000:]}", file=sys.stderr)
    else:
        shutil.rmtree(place)
    what = re.search(r"^parses: (.*)", ended.stdout, re.MULTILINE)
    return Row(
        name,
        what[1] if what else "",
        max(map(int, given), default=0),
        round(time.monotonic() - started, 1),
        int(covered[-1]) if covered else 0,
        found,
    )


def fuzz(name: str, inputs: int, seconds: int) -> None:
    """Fuzz one target in this process. Does not return."""
    import atheris  # type: ignore[import-untyped]

    with atheris.instrument_imports(include=["plumbline"]):
        from targets import TARGETS

    target = TARGETS[name]
    print(f"parses: {target.what}", flush=True)
    corpus = Path("corpus")
    corpus.mkdir()
    for number, seed in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(seed)
    longest = 2 * max(len(seed) for seed in target.seeds())
    arguments = [f"-runs={inputs}", f"-max_total_time={seconds}", f"-max_len={max(longest, 256)}", "-timeout=20"]
    atheris.Setup([sys.argv[0], *arguments, "-rss_limit_mb=4096", str(corpus)], target.answer)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
