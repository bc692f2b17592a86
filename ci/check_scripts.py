"""Checks real training scripts with ``plumbline check``: each verdict must be true, and claim only what was judged.

    python ci/check_scripts.py --checkouts FOLDER              # everything, into reports/check-real-scripts.md
    python ci/check_scripts.py --checkouts FOLDER --jobs 2     # two at a time
    python ci/check_scripts.py --checkouts FOLDER --only gpt   # a part of it, printed
    python ci/check_scripts.py --part half-judged                # trainings that can be judged only in part
    python ci/check_scripts.py --part plain                    # no check: do the scripts run, and repeat themselves?

``ci/check_scripts/`` has the tables: ``published.py``, ``libraries.py``, ``parallel.py``, ``pictures.py`` and
``teaching.py`` (scripts of public repositories, with checkouts in FOLDER as ``owner+name``), ``rewritten.py`` (our own
scripts), ``half_judged.py`` (trainings that are wrong, or that can be judged only in part) and ``mistakes.py``. The
page counts false praise and false accusations. Pass interpreters with more packages with ``--python``. Exits with 1 if
a verdict is not as expected. Run it every night; it takes half an hour on two cores with ``--jobs 2``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "check_scripts"))

from half_judged import HALF_JUDGED_SCRIPTS
from mistake import FILES, Mistake, changed
from mistakes import MISTAKES
from page import Mistakes, Scripts, number, page
from published import PUBLISHED
from result import CHANGED, UNSTEADY, Result, first_difference, is_right, last_lines, losses_of, read, write
from rewritten import REWRITTEN_SCRIPTS
from running import CannotRunError, Placed, interpreter, prepare
from script import Script
from torch_aborts import despite_aborts

ROOT = Path(__file__).resolve().parent.parent

SCRIPTS = {script.name: script for script in (*PUBLISHED, *REWRITTEN_SCRIPTS, *HALF_JUDGED_SCRIPTS)}


def main() -> int:
    """Run the selection, print the page, and write it if everything was selected."""
    asked = parsed()
    kept = read(asked.keep) if asked.keep else {}
    scripts, mistakes = results(chosen_scripts(asked), chosen_mistakes(asked), asked, kept)
    text = page(scripts, mistakes, kept=bool(kept))
    print(text)
    if not asked.only and asked.part in (None, "page"):
        asked.report.write_text(text, encoding="utf-8")
    right = [is_right(result, script, None) for script, result in scripts]
    right += [is_right(result, script, mistake) for mistake, script, result in mistakes]
    every = [result for _, result in scripts] + [result for *_, result in mistakes]
    left = sum(bool(one.why_not) for one in every)
    print(f"In all: {len(right) - left} trainings, {sum(right) - left} of them as expected; {left} cannot run here")
    return 0 if all(right) else 1


def results(
    scripts: Sequence[Script],
    mistakes: Sequence[tuple[Mistake, Script]],
    asked: argparse.Namespace,
    kept: dict[str, Result],
) -> tuple[Scripts, Mistakes]:
    """Return the results of scripts, with and without mistakes; up to ``--jobs`` of them run at a time."""
    with ThreadPoolExecutor(asked.jobs) as pool:
        try:
            plain = [pool.submit(outcome, script, None, asked, kept) for script in scripts]
            wrong = [pool.submit(outcome, script, mistake, asked, kept) for mistake, script in mistakes]
            return (
                [(script, one.result()) for script, one in zip(scripts, plain, strict=True)],
                [(*pair, one.result()) for pair, one in zip(mistakes, wrong, strict=True)],
            )
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C, running scripts finish, and no others start


def chosen_scripts(asked: argparse.Namespace) -> list[Script]:
    """Return the selected scripts."""
    if asked.part == "mistakes":
        return []
    whole = (*PUBLISHED, *REWRITTEN_SCRIPTS)
    scripts = {"scripts": whole, "half-judged": HALF_JUDGED_SCRIPTS}.get(asked.part, SCRIPTS.values())
    return [one for one in scripts if not asked.only or any(word in one.name for word in asked.only)]


def chosen_mistakes(asked: argparse.Namespace) -> list[tuple[Mistake, Script]]:
    """Return the selected mistakes, each with the scripts that it is put into."""
    if asked.part in ("plain", "scripts", "half-judged"):
        return []
    every = [(mistake, SCRIPTS[name]) for mistake in MISTAKES for name in mistake.changes]
    return [
        (mistake, script)
        for mistake, script in every
        if not asked.only or any(word in f"{mistake.name} in {script.name}" for word in asked.only)
    ]


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, help="folder with the checkouts of the published scripts")
    parser.add_argument("--python", action="append", default=[], help="an interpreter with more packages")
    parser.add_argument("--only", action="append", default=[], help="a part of the name of a script or mistake")
    parser.add_argument(
        "--part",
        choices=("plain", "scripts", "half-judged", "mistakes", "page"),
        help="page: of the kept results (default: all)",
    )
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps to record (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one run (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="scripts that run at a time (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="file of results; those in it are not run again")
    parser.add_argument("--write", type=Path, help="file that results are added to, for --part page --keep")
    parser.add_argument("--report", type=Path, default=ROOT / "reports" / "check-real-scripts.md")
    asked = parser.parse_args()
    asked.python = (sys.executable, *asked.python)
    return asked


def outcome(script: Script, mistake: Mistake | None, asked: argparse.Namespace, kept: dict[str, Result]) -> Result:
    """Return a script's result, or the kept one; print and keep it."""
    name = Result(script.name, mistake.name if mistake else "").name
    if name in kept:
        return kept[name]
    if asked.part == "page":
        return Result(script.name, mistake.name if mistake else "", why_not="not this time")
    try:
        with place(script, asked, mistake) as placed:
            result = tried(placed, mistake.name, mistake.steps or asked.steps) if mistake else checked(placed, asked)
    except CannotRunError as error:
        result = Result(script.name, mistake.name if mistake else "", why_not=str(error))
    print(line(result, is_right(result, script, mistake)), file=sys.stderr, flush=True)
    for file in {asked.keep, asked.write} - {None}:
        write(file, result)
    return result


def checked(placed: Placed, asked: argparse.Namespace) -> Result:
    """Run a script plainly and under check, and plainly again if the losses differ."""
    name = placed.script.name
    first = despite_aborts(placed.run)
    if first.code != 0 or (placed.script.calls_backward and not first.losses):
        return Result(name, plain_seconds=first.seconds, failed=f"exit {first.code}\n{last_lines(first)}")
    if asked.part == "plain":
        return Result(name, plain_seconds=first.seconds, losses=losses_of(first, placed.run(), None))
    recorded = despite_aborts(lambda: placed.check(asked.steps))
    second = placed.run() if recorded.losses != first.losses else None
    losses = UNSTEADY if placed.script.races else losses_of(first, recorded, second)
    failed = first_difference(first, recorded) if losses == CHANGED else ""
    failed = failed if recorded.verdict else last_lines(recorded)
    return Result(name, "", first.seconds, recorded.seconds, losses, recorded.verdict, failed)


def tried(placed: Placed, mistake: str, steps: int) -> Result:
    """Run a script under check; ``mistake`` is the name of the mistake that was put into it."""
    recorded = despite_aborts(lambda: placed.check(steps))
    failed = "" if recorded.verdict else last_lines(recorded)
    return Result(placed.script.name, mistake, None, recorded.seconds, "", recorded.verdict, failed)


@contextmanager
def place(script: Script, asked: argparse.Namespace, mistake: Mistake | None = None) -> Iterator[Placed]:
    """Copy a script into a temporary folder."""
    python = interpreter(script, tuple(asked.python))
    with tempfile.TemporaryDirectory(prefix="check-scripts-") as folder:
        placed = prepare(script, Path(folder), asked.checkouts, python, asked.time_limit)
        if mistake is not None:
            file = placed.original / FILES[script.name]
            file.write_text(changed(file.read_text(encoding="utf-8"), mistake.changes[script.name]), encoding="utf-8")
        yield placed


def line(result: Result, right: bool) -> str:
    """Return the printed line about a result."""
    if result.why_not:
        return f"{result.name}: not run: {result.why_not}"
    times = f"{number(result.plain_seconds, '.0f')} s, under check {number(result.seconds, '.0f')} s"
    said = f"{result.verdict.answer}: {result.verdict.sentence}" if result.verdict else "no verdict"
    text = f"{'ok  ' if right else 'NOT '} {result.name}: {said} [losses {result.losses or '–'}; {times}]"
    return "\n    ".join([text, *result.failed.splitlines()])


if __name__ == "__main__":
    sys.exit(main())
