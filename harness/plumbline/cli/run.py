"""``plumbline run``: run the suites from any folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plumbline.core.invocation import SUITES, command, pytest_arguments

if TYPE_CHECKING:
    import pytest


def add_to(commands: Any) -> None:
    # pytest parses the options. Without a prefix character, this parser passes all words on.
    parser = commands.add_parser("run", add_help=False, prefix_chars="\0")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(do=run)


def run(options: argparse.Namespace) -> int:
    """Run suites with pytest and write reports to the current folder. All other arguments are passed to pytest.

    Exit code, as pytest's: 0 all passed, 1 something failed, 2 interrupted, 4 invalid command line, 5 no cells.
    """
    words = options.words
    if {"-h", "--help"} & set(words):
        from plumbline.pytest_plugin.plugin import add_options

        parser = argparse.ArgumentParser(
            usage=f"{command('plumbline', 'run')} [SUITE ...] [OPTIONS]",
            description=run.__doc__,
            epilog="pytest's own options work too: -k EXPRESSION, -m smoke, -x, --lf, --collect-only, -n 2, …",
        )
        parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)} (default: {SUITES[0]})")
        add_options(parser.add_argument)
        parser.print_help()
        return 0
    arguments = pytest_arguments(words)
    import pytest

    return int(pytest.main(arguments, plugins=[_CommandLine(words)]))


class _CommandLine:
    """A pytest plugin that records the command line as it was typed."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def pytest_configure(self, config: pytest.Config) -> None:
        from plumbline.pytest_plugin.plugin import COMMAND

        config.stash[COMMAND] = ["plumbline", "run", *self._words]
