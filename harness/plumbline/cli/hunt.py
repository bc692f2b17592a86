"""``plumbline hunt``: search for problems on which a trainer is wrong."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.core.exit_codes import TROUBLE
from plumbline.subjects.locator import parse_subject

if TYPE_CHECKING:
    from plumbline.hunt.corpus import Corpus
    from plumbline.hunt.search import Failure, Search


def add_to(commands: Any) -> None:
    command = commands.add_parser("hunt", description=hunt.__doc__)
    command.add_argument("--subject", required=True, metavar="WHAT", help="a trainer, as for the suites")
    command.add_argument(
        "--minutes", type=_time("minutes"), default=10.0, metavar="M", help="search for so long (default: 10)"
    )
    command.add_argument("--seed", type=int, metavar="S", help="draw from here on (default: where the last one ended)")
    command.add_argument(
        "--time-limit", type=_time("seconds"), default=60.0, metavar="S", help="end a training after S (default: 60)"
    )
    command.add_argument("--gpus", type=int, default=4, metavar="K", help="devices of the largest cell (default: 4)")
    command.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="corpus of failures (default: reports/hunt/SUBJECT); of several subjects each has a folder in it",
    )
    command.add_argument(
        "--again",
        action="store_true",
        help="draw nothing: train the corpus' problems once more, and write their pages again",
    )
    command.set_defaults(do=hunt)


def hunt(options: argparse.Namespace) -> int:
    """Draw training problems, train them on one of the subject's cells each, and judge them. Shrink what fails.

    A failure is shrunk to the plainest problem that fails with the same cause, and written to the corpus: a file that
    ``--workload`` takes, a program without Plumbline, which is run, and a page about both. Causes that are in the
    corpus, or expected of the subject, are not searched again.

    Exit code: 0 nothing new was found (with --again: no problem fails any more), 1 otherwise, 4 invalid usage.
    """
    try:
        from plumbline.engine.open_subject import open_subject
        from plumbline.hunt.subject import searches
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        print(
            "plumbline: hunt needs hypothesis, which is not installed: pip install 'torch-plumbline[hunt]'",
            file=sys.stderr,
        )
        return TROUBLE
    with (
        open_subject(options.subject) as (pool, declared),
        tempfile.TemporaryDirectory(prefix="plumbline-") as scratch,
    ):
        every = searches(pool, declared, options.gpus, Path(scratch), options.time_limit)
        return max([_one(search, len(every), options) for search in every])


def _one(search: Search, of: int, options: argparse.Namespace) -> int:
    from plumbline.hunt.corpus import Corpus

    name = search.declared[0].name
    folder = options.folder or Path("reports", "hunt")
    tell = _Teller(search, Corpus(folder if options.folder and of == 1 else folder / name), options.subject)
    if of > 1:
        print(f"\n{name}", flush=True)
    return _again(tell) if options.again else _search(tell, options.minutes / of, options.seed)


@dataclass(frozen=True)
class _Teller:
    """Writes failures up and says so."""

    search: Search
    corpus: Corpus
    subject: str

    def __call__(self, failure: Failure) -> None:
        from plumbline.hunt.problem_file import in_words

        self.corpus.add(failure)
        print(f"\n{failure.cause}\n  {failure.drawn.cell.id}\n  {in_words(failure.drawn.recipe)}")
        print(f"  {failure.finding.message}", flush=True)
        self.write_up(failure)

    def write_up(self, failure: Failure) -> None:
        from plumbline.hunt.write_up import write_up

        python = parse_subject(self.subject)[1] or sys.executable
        written = write_up(failure, self.search.declared, self.subject, python, self.corpus.folder)
        said = "no program without Plumbline" if written.shown is None else f"without Plumbline: {written.shown.value}"
        print(f"  {written.page}: {said}", flush=True)


def _search(tell: _Teller, minutes: float, seed: int | None) -> int:
    search, corpus = tell.search, tell.corpus
    search.known |= corpus.causes
    first = corpus.progress["rounds"] if seed is None else seed
    try:
        search.run(minutes * 60, first, tell)
    finally:
        corpus.went_on(search.counts)
        counts = search.counts
        print(
            f"\n{counts['drawn']} problems drawn: {counts['trained']} trained and judged, {counts['failed']} failed, "
            f"{counts['unfit']} not fit for judging, {counts['refused']} that the subject does not train, "
            f"{counts['vacuous']} right with a check that could show nothing; "
            f"{counts['causes']} new causes"
        )
    return int(counts["causes"] > 0)


def _again(tell: _Teller) -> int:
    still = 0
    for found in tell.corpus:
        failure = tell.search.train(found.drawn)
        same = failure is not None and failure.cause == found.cause
        answer = "fails as before" if same else "right" if failure is None else f"fails otherwise: {failure.cause}"
        print(f"{found.drawn.cell.id}  {found.cause}  {answer}", flush=True)
        if failure is not None:
            tell.write_up(failure)
            still += 1
    return int(still > 0)


def _time(unit: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        amount = float(text)
        if not (amount > 0 and math.isfinite(amount)):
            raise argparse.ArgumentTypeError(f"{text} is no number of {unit}: give one above 0")
        return amount

    return parse
