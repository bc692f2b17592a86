"""``plumbline hunt``: search for training problems that a trainer gets wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.cli.arguments import declare, duration, path, print_error
from plumbline.core.errors import TROUBLE
from plumbline.core.numbers import counted
from plumbline.report.output_file import refuse_file_as_folder
from plumbline.subjects.load import parse_subject

if TYPE_CHECKING:
    from plumbline.hunt.search import Failure, Search
    from plumbline.hunt.write_up import Corpus


def add_to(commands: Any) -> None:
    add = declare(commands, "hunt", hunt)
    add("--subject", required=True, metavar="WHAT", help="the trainer, as for the suites")
    add("--minutes", type=duration, default=10.0, metavar="M", help="duration of the search (default: 10)")
    seed = "seed of the first problem (default: continue where the last search ended)"
    add("--seed", type=int, metavar="S", help=seed)
    limit = "time limit of each training in seconds (default: 60)"
    add("--time-limit", type=duration, default=60.0, metavar="S", help=limit)
    add("--gpus", type=int, default=4, metavar="K", help="maximum number of devices (default: 4)")
    folder = (
        "folder for the failures found (default: reports/hunt/SUBJECT); with several subjects, each gets a subfolder"
    )
    add("--folder", type=path, metavar="DIR", help=folder)
    again = "train the problems found so far again and rewrite their pages, instead of searching"
    add("--again", action="store_true", help=again)


def hunt(options: argparse.Namespace) -> int:
    """Train a subject on randomly generated problems, judge each training, and shrink the problems that fail.

    A failure is shrunk to the simplest problem that fails with the same cause. The folder gets a file for
    ``--workload``, a program without Plumbline that is run to confirm the failure, and a page about both. Causes that
    are in the folder, or expected of the subject, are not reported again.

    Exit code: 0 nothing new was found (with --again: no problem fails any more), 1 otherwise, 4 invalid command line.
    """
    try:
        from plumbline.engine.subject_pools import open_subject
        from plumbline.hunt.search import searches
        from plumbline.hunt.write_up import Corpus
        from plumbline.planning.plan import Matrix, check_ranks
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        print_error("hunt needs hypothesis: pip install 'torch-plumbline[hunt]'")
        return TROUBLE
    if options.folder:
        refuse_file_as_folder("--folder", options.folder)
    check_ranks(Matrix(options.gpus))
    with (
        open_subject(options.subject) as (pool, declared),
        tempfile.TemporaryDirectory(prefix="plumbline-") as scratch,
    ):
        every = searches(pool, declared, options.gpus, Path(scratch), options.time_limit)
        ends = []
        for search in every:
            name = search.declared[0].name
            folder = options.folder or Path("reports", "hunt")
            own = folder if options.folder and len(every) == 1 else folder / name
            if len(every) > 1:
                print(f"\n{name}", flush=True)
            if options.again:
                ends.append(_again(search, Corpus(own), options.subject))
            else:
                ends.append(_search(search, Corpus(own), options, options.minutes / len(every)))
        return max(ends)


def _write_up(failure: Failure, search: Search, corpus: Corpus, subject: str) -> None:
    from plumbline.hunt.write_up import write_up

    python = parse_subject(subject)[1] or sys.executable
    written = write_up(failure, search.declared, subject, python, corpus.folder)
    said = "no standalone program" if written.shown is None else f"standalone program: {written.shown.value}"
    print(f"  {written.page}: {said}", flush=True)


def _search(search: Search, corpus: Corpus, options: argparse.Namespace, minutes: float) -> int:
    from plumbline.hunt.search import in_words

    def tell(failure: Failure) -> None:
        corpus.add(failure)
        print(f"\n{failure.cause}\n  {failure.drawn.cell.id}\n  {in_words(failure.drawn.recipe)}")
        print(f"  {failure.finding.message}", flush=True)
        _write_up(failure, search, corpus, options.subject)

    search.known |= corpus.causes
    first = corpus.progress["rounds"] if options.seed is None else options.seed
    try:
        search.run(minutes * 60, first, tell)
    finally:
        corpus.went_on(search.counts)
        counts = search.counts
        print(
            f"\n{counted(counts['drawn'], 'problem')} generated: {counts['trained']} trained and judged, "
            f"{counts['failed']} failed, {counts['unfit']} unsuitable for judging, "
            f"{counts['refused']} not supported by the subject, "
            f"{counts['vacuous']} passed although a check could not have failed; "
            f"{counted(counts['causes'], 'new cause')}"
        )
    return int(counts["causes"] > 0)


def _again(search: Search, corpus: Corpus, subject: str) -> int:
    still = 0
    for found in corpus:
        failure = search.train(found.drawn)
        same = failure is not None and failure.cause == found.cause
        answer = "fails as before" if same else "passes" if failure is None else f"fails with {failure.cause}"
        print(f"{found.drawn.cell.id}  {found.cause}  {answer}", flush=True)
        if failure is not None:
            _write_up(failure, search, corpus, subject)
            still += 1
    return int(still > 0)
