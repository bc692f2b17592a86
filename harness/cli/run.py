"""``plumbline run``: the suites, from any folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.core.errors import PlanError
from harness.core.exit_codes import USAGE
from harness.core.invocation import SUITES, command, pytest_arguments

if TYPE_CHECKING:
    import pytest

NO_PREFIX = "\0"


def add_to(commands: Any) -> None:
    """Say how the command is called."""
    told = "run a suite, from any folder: is the trainer right, is it fast, does the judge notice?"
    # Options are pytest's to parse: to this parser no word is one.
    parser = commands.add_parser("run", help=told, add_help=False, prefix_chars=NO_PREFIX)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(do=run)


def run(options: argparse.Namespace) -> int:
    """Run suites by pytest, with reports in the present folder; all other words are pytest's options.

    Its exit code is pytest's: 0 all passed, 1 something failed, 2 interrupted, 4 the command line is wrong, 5 no cells.
    """
    words = options.words
    if {"-h", "--help"} & set(words):
        _usage().print_help()
        return 0
    try:
        arguments = pytest_arguments(words)
    except PlanError as error:
        print(f"plumbline: {error}", file=sys.stderr)
        return USAGE
    import pytest

    return int(pytest.main(arguments, plugins=[_Typed(words)]))


class _Typed:
    """A pytest plugin that says what the user typed."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def pytest_configure(self, config: pytest.Config) -> None:
        from harness.pytest_plugin.plugin import COMMAND

        config.stash[COMMAND] = ["plumbline", "run", *self._words]


def _usage() -> argparse.ArgumentParser:
    from harness.pytest_plugin.plugin import add_options

    parser = argparse.ArgumentParser(
        usage=f"{command('plumbline', 'run')} [SUITE ...] [OPTIONS]",
        description=run.__doc__,
        epilog="-k EXPRESSION, -m smoke, -x, --lf, --collect-only, -n 2 and pytest's other options mean what they do "
        "in pytest.",
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)} (default: {SUITES[0]})")
    add_options(parser.add_argument)
    return parser
