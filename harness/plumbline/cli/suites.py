"""``plumbline run`` runs the suites from any folder, ``plumbline submit`` on the machines of a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.cli.arguments import ACCELERATOR, IGNORE, IGNORE_HELP, print_error, read_settings, words_of
from plumbline.core.errors import TROUBLE, PlanError
from plumbline.core.invocation import SUITES, command, pytest_arguments
from plumbline.report.text import settings_in_words
from plumbline.submit.engines import ENGINES, find_engine

if TYPE_CHECKING:
    import pytest


def run(options: argparse.Namespace) -> int:
    """Run suites with pytest and write reports to the current folder. All other arguments are passed to pytest.

    Options may be in ``[tool.plumbline.run]`` of ``pyproject.toml``; ``--no-settings`` ignores it.

    Exit code, as pytest's: 0 all passed, 1 something failed, 2 interrupted, 4 invalid command line, 5 no cells.
    """
    words = [word for word in options.words if word != IGNORE]
    if {"-h", "--help"} & set(words):
        run_parser().print_help()
        return 0
    suites = list(takewhile(lambda word: not word.startswith(("-", "@")), words))
    used = {} if len(words) < len(options.words) else _settings(words[len(suites) :])
    if used:
        print_error(settings_in_words(used))
    arguments = pytest_arguments([*suites, *words_of(used), *words[len(suites) :]])
    import pytest

    return int(pytest.main(arguments, plugins=[_CommandLine(words, used)]))


def run_parser() -> argparse.ArgumentParser:
    """Return a parser of Plumbline's own options of ``run``. pytest parses them, together with its own."""
    from plumbline.pytest_plugin.plugin import add_options

    parser = argparse.ArgumentParser(
        usage=f"{command('plumbline', 'run')} [SUITE ...] [OPTIONS]",
        description=run.__doc__,
        epilog="pytest's own options work too: -k EXPRESSION, -m smoke, -x, --lf, --collect-only, -n 2, …",
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)} (default: {SUITES[0]})")
    add_options(parser.add_argument)
    parser.add_argument(IGNORE, action="store_true", help=IGNORE_HELP)
    return parser


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the project's file that the command line does not give."""
    given = {word.partition("=")[0] for word in words}  # pytest takes no abbreviations
    found = read_settings("run", run_parser())
    return {name: one.written for name, one in found.items() if f"--{name}" not in given}


class _CommandLine:
    """A pytest plugin that records the command line as it was typed, and settings of the project's file."""

    def __init__(self, words: Sequence[str], used: dict[str, Any]) -> None:
        self._words = words
        self._settings = used

    def pytest_configure(self, config: pytest.Config) -> None:
        from plumbline.pytest_plugin.plugin import COMMAND, SETTINGS

        config.stash[COMMAND] = ["plumbline", "run", *self._words]
        config.stash[SETTINGS] = self._settings


def add_to(commands: Any) -> None:
    # pytest parses the options of `run`. Without a prefix character, this parser passes all words on.
    parser = commands.add_parser("run", add_help=False, prefix_chars="\0")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(do=run)
    parser = commands.add_parser(
        "submit",
        description="Run `plumbline run ARGUMENTS` on a SLURM, Kubernetes or Ray cluster, split over tasks. Wait, "
        "resubmit the cells of preempted and failed tasks, and merge all parts into one run. This machine and every "
        "node must mount the report directory at the same path; for slurm and ray also the Python environment and the "
        "checkout, if there is one.",
    )
    add = parser.add_argument
    add("--engine", default="slurm", metavar="NAME", help=f"cluster: {', '.join(ENGINES)} (default: %(default)s)")
    add("--nodes", type=int, metavar="N", help="nodes per task")
    add("--gpus", type=int, metavar="N", help="devices per node")
    add("--array", type=int, default=1, metavar="N", help="number of tasks to split the cells over (default: 1)")
    variable = "environment variable to set; NAME alone passes the current value (repeatable)"
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help=variable)
    add("--accelerator", **ACCELERATOR, help="type of the nodes' devices; cpu requests no GPUs (default: auto)")
    add("--report-dir", type=Path, metavar="DIR", help="folder for the run (default: reports/)")
    add("--dry-run", action="store_true", help="print the job and its cells, and submit nothing")
    add("--attach", type=Path, metavar="RUN", help="resume a submitted run, for example reports/latest")
    for engine in ENGINES.values():
        engine.add_options(add)
    add("arguments", nargs="*", metavar="-- ARGUMENTS", help="arguments of plumbline run, or of pytest with a path")
    example = command("plumbline", "submit", "--nodes", "1", "--gpus", "2", "--", "--workloads", "mlp")
    parser.set_defaults(do=submit, hint_for_unknown=f"; put options of the run after `--`: {example}")


def submit(options: argparse.Namespace) -> int:
    from plumbline.core.numbers import counted
    from plumbline.report.formats import write_report
    from plumbline.report.terminal import support_for_terminal
    from plumbline.submit.follow import Follower
    from plumbline.submit.submission import Submission, SubmitRequest, prepare

    if options.attach:
        submission = Submission.load(options.attach)
    else:
        if options.nodes is None or options.gpus is None:
            raise PlanError("give --nodes and --gpus, or --attach RUN")
        request = SubmitRequest(
            engine=find_engine(options),
            nodes=options.nodes,
            gpus=options.gpus,
            tasks=options.array,
            accelerator=options.accelerator,
            report_dir=options.report_dir,
            pytest=tuple(options.arguments),
        )
        submission = prepare(request, ("plumbline", *sys.argv[1:]))
        if options.dry_run:
            print(submission.engine.text(submission, submission.new_job(), range(len(submission.tasks))), end="")
            for task, cells in enumerate(submission.tasks):
                few = f"{', '.join(cells[:3])}{', …' if len(cells) > 3 else ''}"
                print(f"# task {task}: {counted(len(cells), 'cell')}: {few}")
            return 0
        submission.save()
    later = command("plumbline", "submit", "--attach", str(submission.run))
    print(f"{submission.run}: resume it later with {later}")
    run = Follower(submission, lambda line: print(line, flush=True)).follow()
    if run is None:
        return TROUBLE
    write_report(run.path)
    print(support_for_terminal(run, width=100, colour=sys.stdout.isatty()).rstrip("\n"))
    print(f"report: {run.path / 'report.html'}")
    return TROUBLE if run.footer is None else run.footer.exit_status
