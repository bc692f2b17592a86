"""Checks whether ``plumbline check`` catches mistakes in parallel code, and whether its first line names them.

    python ci/check_meshes.py --checkouts FOLDER --python INTERPRETER --jobs 2
    python ci/check_meshes.py --checkouts FOLDER --only pipeline          # a part of it

``ci/check_scripts/mesh_bases.py`` has the right trainings, which must not be accused, and ``mesh_mistakes.py`` the
mistakes in them. Prints a section for ``reports/check-real-scripts.md``. Exits with 1 if a right training is accused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "check_scripts"))

from check_scripts import line, place, tried
from mesh_bases import BASES
from mesh_mistakes import MESH_MISTAKES, MeshMistake
from result import Result, read, write
from running import CannotRunError
from script import Script


def main() -> int:
    """Run the selected trainings, and print the section."""
    asked = parsed()
    kept = read(asked.keep) if asked.keep else {}
    bases = [one for one in BASES if is_asked(one.name, asked.only)]
    mistakes = [one for one in MESH_MISTAKES if is_asked(f"{one.parallelism}: {one.script.name}", asked.only)]
    with ThreadPoolExecutor(asked.jobs) as pool:
        right = [pool.submit(outcome, one, asked, kept) for one in ([] if asked.mistakes else bases)]
        wrong = [pool.submit(outcome, one.script, asked, kept) for one in mistakes]
        bases_done = [(one, future.result()) for one, future in zip(bases, right, strict=False)]
        done = [(one, future.result()) for one, future in zip(mistakes, wrong, strict=True)]
    print("\n".join(section(bases_done, done)))
    return int(any(is_caught(result) for _, result in bases_done))


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, help="folder with the checkouts of the published scripts")
    parser.add_argument("--python", action="append", default=[], help="an interpreter with more packages")
    parser.add_argument("--only", action="append", default=[], help="a part of the name of a training or mistake")
    parser.add_argument("--mistakes", action="store_true", help="leave out the right trainings")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps to record (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one run (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings that run at a time (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="file of results; those in it are not run again")
    asked = parser.parse_args()
    asked.python = (sys.executable, *asked.python)
    return asked


def is_asked(name: str, words: Sequence[str]) -> bool:
    """Return whether a part of the name was selected."""
    return not words or any(word in name for word in words)


def outcome(script: Script, asked: argparse.Namespace, kept: dict[str, Result]) -> Result:
    """Return check's result for a training, or the kept one."""
    if script.name in kept:
        return kept[script.name]
    try:
        with place(script, asked) as placed:
            result = tried(placed, "", asked.steps)
    except CannotRunError as error:
        result = Result(script.name, why_not=str(error))
    print(line(result, True), file=sys.stderr, flush=True)
    if asked.keep:
        write(asked.keep, result)
    return result


def is_caught(result: Result) -> bool:
    """Return whether a training is called wrong."""
    return result.verdict is not None and result.verdict.answer == "wrong"


def is_named(mistake: MeshMistake, result: Result) -> bool:
    """Return whether the first finding's cause says what the mistake is."""
    return result.verdict is not None and is_caught(result) and result.verdict.cause in mistake.causes


def section(bases: Sequence[tuple[Script, Result]], mistakes: Sequence[tuple[MeshMistake, Result]]) -> list[str]:
    """Return the report's section."""
    caught = sum(is_caught(result) for _, result in mistakes)
    named = sum(is_named(mistake, result) for mistake, result in mistakes)
    accused = sum(is_caught(result) for _, result in bases)
    return [
        "## Mistakes in parallel code",
        "",
        f"{len(mistakes)} mistakes from public trackers: {caught} caught, {named} named by the first line. "
        f"{len(bases)} right trainings: {accused} accused.",
        "",
        "| parallelism | mistake | reported in | training | verdict | named | s |",
        "| --- | --- | --- | --- | --- | :-: | --: |",
        *mistake_rows(mistakes),
        "",
        "| right training | verdict | s |",
        "| --- | --- | --: |",
        *(f"| {script.name}: {script.covers} | {verdict_of(result)} | {seconds(result)} |" for script, result in bases),
    ]


def mistake_rows(mistakes: Sequence[tuple[MeshMistake, Result]]) -> Iterator[str]:
    """Yield the rows of mistakes."""
    for one, result in mistakes:
        named = "yes" if is_named(one, result) else "**no**"
        cells = (one.parallelism, one.name, one.tracker, one.base.name, verdict_of(result), named, seconds(result))
        yield f"| {' | '.join(cells)} |"


def verdict_of(result: Result) -> str:
    """Return the verdict, and the cause if it is wrong."""
    if result.verdict is None:
        return result.why_not or "no verdict"
    return f"{result.verdict.check}: {result.verdict.cause}" if is_caught(result) else result.verdict.answer


def seconds(result: Result) -> str:
    """Return the time of the command under check."""
    return f"{result.seconds:.0f}" if result.seconds else "–"


if __name__ == "__main__":
    sys.exit(main())
