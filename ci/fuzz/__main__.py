"""Coverage-guided fuzzing of everything that parses (needs atheris: ``pip install atheris``).

    python ci/fuzz                      # every target, 20000 inputs each
    python ci/fuzz --only trace --inputs 100000

Ends with a table: how many inputs each target was given, and whether one of them was answered with anything but the
promised error. An input that was is kept, and named.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("gpus", "hosts", "subject", "names", "results", "trace", "expectations")


def main() -> int:
    """Fuzz each target in a process of its own: the fuzzer ends the process that it runs in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NAMES, action="append", help="a target (repeatable)")
    parser.add_argument("--inputs", type=int, default=20_000, help="for each target (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=600, help="at most, for each target (default: %(default)s)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        fuzz(options.inside, options.inputs, options.seconds)
    print("| target | inputs | seconds | edges covered | answered as promised |\n|---|--:|--:|--:|:-:|")
    bad = 0
    for name in options.only or NAMES:
        found = Path(tempfile.mkdtemp(prefix=f"plumbline-fuzz-{name}-"))
        started = time.monotonic()
        command = [sys.executable, __file__, "--inside", name, f"--inputs={options.inputs}"]
        ended = subprocess.run(
            [*command, f"--seconds={options.seconds}"], cwd=found, capture_output=True, text=True, errors="replace"
        )
        seconds = time.monotonic() - started
        inputs = [int(count) for count in re.findall(r"^#(\d+)\s", ended.stderr, re.MULTILINE)]
        inputs += [int(count) for count in re.findall(r"^Done (\d+) runs", ended.stderr, re.MULTILINE)]
        covered = re.findall(r"cov: (\d+)", ended.stderr)
        good = ended.returncode == 0
        print(f"| {name} | {max(inputs, default=0)} | {seconds:.0f} | {covered[-1] if covered else ''} |", end=" ")
        print(f"{'yes' if good else 'no'} |", flush=True)
        if not good:
            bad += 1
            kept = [str(file) for file in found.iterdir()]
            print(
                f"{name}: {', '.join(kept) or 'no input was kept'}\n{ended.stdout[-2000:]}{ended.stderr[-1000:]}",
                file=sys.stderr,
            )
    return 1 if bad else 0


def fuzz(name: str, inputs: int, seconds: int) -> None:
    """Fuzz one target in this process. Does not return."""
    import atheris

    with atheris.instrument_imports(include=["harness"]):
        from targets import TARGETS

    target = TARGETS[name]
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
