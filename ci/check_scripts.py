"""Real training scripts under ``plumbline check``: is each right one called right, is each mistake found and named?

    python ci/check_scripts.py --checkouts FOLDER              # everything, into reports/check-real-scripts.md
    python ci/check_scripts.py --checkouts FOLDER --only gpt   # some of it, printed
    python ci/check_scripts.py --part plain                    # no check: do the scripts run, and repeat themselves?

``ci/check_scripts/`` has the tables: ``published.py`` (scripts of public repositories, whose checkouts lie in FOLDER
as ``owner+name``), ``rewritten.py`` (scripts of our own) and ``mistakes.py``. Interpreters that have further packages
are named with ``--python``. Exits with 1 where anything is not as it should be. For every night; an hour on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent / "check_scripts"))

from mistakes import FILES, MISTAKES, Mistake, changed
from page import Checked, Tried, page
from published import PUBLISHED
from rewritten import REWRITTEN_SCRIPTS
from running import CannotRunError, Placed, interpreter, prepare
from script import Script

ROOT = Path(__file__).resolve().parent.parent
Ended = TypeVar("Ended", Checked, Tried)
SCRIPTS = {script.name: script for script in (*PUBLISHED, *REWRITTEN_SCRIPTS)}


def main() -> int:
    """Run what is asked for, print the page, and write it if it was everything."""
    asked = parsed()
    only: list[str] = asked.only
    scripts: list[Checked] = []
    mistakes: list[Tried] = []
    if asked.part != "mistakes":
        chosen = [one for one in SCRIPTS.values() if not only or any(word in one.name for word in only)]
        scripts = [told(checked(one, asked)) for one in chosen]
    if asked.part in (None, "mistakes"):
        for mistake in MISTAKES:
            for name in mistake.changes:
                if not only or any(word in f"{mistake.name} {name}" for word in only):
                    mistakes += [told(tried(mistake, SCRIPTS[name], asked))]
    text = page(scripts, mistakes)
    print(text)
    if not only and asked.part is None:
        asked.report.write_text(text, encoding="utf-8")
    right = [one.is_as_it_should_be for one in scripts] + [one.is_as_it_should_be for one in mistakes]
    return 0 if all(right) else 1


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, help="folder with the checkouts of the published scripts")
    parser.add_argument("--python", action="append", default=[], help="an interpreter with further packages")
    parser.add_argument("--only", action="append", default=[], help="a part of the name of a script or mistake")
    parser.add_argument("--part", choices=("plain", "scripts", "mistakes"), help="default: scripts and mistakes")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps to record (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one run (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=ROOT / "reports" / "check-real-scripts.md")
    asked = parser.parse_args()
    asked.python = (sys.executable, *asked.python)
    return asked


def checked(script: Script, asked: argparse.Namespace) -> Checked:
    """Run a script plainly and under check, and plainly again where the losses differ."""
    try:
        with place(script, asked) as placed:
            first = placed.run()
            if asked.part == "plain":
                return Checked(script, first, placed.run())
            recorded, verdict = placed.check(asked.steps)
            second = placed.run() if recorded.losses != first.losses else None
            return Checked(script, first, second, recorded, verdict)
    except CannotRunError as error:
        return Checked(script, why_not=str(error))


def tried(mistake: Mistake, script: Script, asked: argparse.Namespace) -> Tried:
    """Run a script with a mistake in it under check."""
    try:
        with place(script, asked, mistake) as placed:
            recorded, verdict = placed.check(asked.steps)
            return Tried(mistake, script, recorded, verdict)
    except CannotRunError as error:
        return Tried(mistake, script, why_not=str(error))


@contextmanager
def place(script: Script, asked: argparse.Namespace, mistake: Mistake | None = None) -> Iterator[Placed]:
    """Put a script into a folder that is gone afterwards."""
    python = interpreter(script, tuple(asked.python))
    with tempfile.TemporaryDirectory(prefix="check-scripts-") as folder:
        placed = prepare(script, Path(folder), asked.checkouts, python, asked.time_limit)
        if mistake is not None:
            file = placed.original / FILES[script.name]
            file.write_text(changed(file.read_text(encoding="utf-8"), mistake.changes[script.name]), encoding="utf-8")
        yield placed


def told(one: Ended) -> Ended:
    """Print one line for what was run, and return it."""
    print(one.line(), file=sys.stderr, flush=True)
    return one


if __name__ == "__main__":
    sys.exit(main())
