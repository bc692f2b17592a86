"""Check a training script, run the suites on a trainer, and inspect, repeat and compare runs."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

from plumbline.cli.arguments import IGNORE, print_error, with_settings
from plumbline.core.errors import TROUBLE, USAGE, PlumblineError, UsageError
from plumbline.report.text import settings_in_words

COMMANDS: Final = {
    "new-subject": "write an example adapter that runs as is, to replace piece by piece with your trainer",
    "new-workload": "write an example training problem that runs as is, to replace piece by piece with yours",
    "check": "check your own training script, unmodified: gradients, updates and data on every rank",
    "smoke": "train a tiny model and say whether the adapter or the trainer is wrong",
    "run": "run a suite from any folder: conformance, performance or detection",
    "subjects": "list the trainers that ship with Plumbline; install exact versions of their libraries",
    "judge": "judge a run's traces again, without training, and print what changed",
    "report": "rewrite the pages and tables of a run, or print one of them",
    "show": "show everything that a run recorded about one cell",
    "history": "write a static site about many runs: what changed and when, and badges",
    "compare": "compare two runs, or the cells of one: outcomes, speed, memory",
    "submit": "run the matrix on a SLURM, Kubernetes or Ray cluster, split over tasks",
    "hunt": "search for training problems that a trainer gets wrong, and shrink them",
    "power": "measure the smallest error of a gradient, update or reported loss that is detected",
    "doctor": "check this machine: devices, links, communication, limits, versions",
    "completion": "print a script that completes commands and options in bash, zsh or fish",
}

MODULES: Final = {
    **dict.fromkeys(("run", "submit"), "suites"),
    **dict.fromkeys(("smoke", "subjects", "new-subject", "new-workload"), "trainers"),
    **dict.fromkeys(("report", "show", "history", "judge"), "recorded_runs"),
}
"""Modules of ``plumbline.cli`` that are not named like their commands. ``add_to`` declares all commands of a module."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.Namespace()
    try:
        options = _options(sys.argv[1:] if arguments is None else arguments)
        return int(options.do(options))
    except UsageError as error:
        used = settings_in_words(getattr(options, "settings", {}))
        print_error(f"{error} ({used}; {IGNORE} ignores them)" if used else error)
        return USAGE
    except (PlumblineError, OSError) as error:
        print_error(error)
        return TROUBLE
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as a shell does


def command_parser(*names: str) -> tuple[argparse.ArgumentParser, Any]:
    """Return the program's parser and the parsers of its commands. Only the commands ``names`` have their options."""
    parser = _Parser(prog="plumbline", description=__doc__)
    shown = "show program's version number and exit"
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=shown)
    commands = parser.add_subparsers(action=_Commands, required=True, metavar="COMMAND")
    for module in dict.fromkeys(MODULES.get(name, name) for name in names):
        import_module(f"plumbline.cli.{module}").add_to(commands)
    for name in COMMANDS:
        if name not in commands.choices:
            commands.add_parser(name)
    return parser, commands


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    given = arguments[0] if arguments else ""
    # Only the module of the given command is imported.
    parser, commands = command_parser(*[given] if given in COMMANDS else [])

    def parse() -> argparse.Namespace:
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            # parse_args would show the usage of plumbline, not of the command.
            command = commands.choices[arguments[0]]
            hint = getattr(options, "hint_for_unknown", "") or _did_you_mean(unknown[0], command)
            command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options

    if given not in ("check", "compare"):
        return parse()
    return with_settings(parse, commands.choices[given], given)


def _did_you_mean(word: str, command: argparse.ArgumentParser) -> str:
    close = difflib.get_close_matches(word.partition("=")[0], command._option_string_actions, 1)
    return f"; did you mean {close[0]}?" if close else ""


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    def add_parser(self, name: str, **further: Any) -> Any:
        return super().add_parser(name, help=COMMANDS[name], **further)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from plumbline.machine.software import plumbline_version  # it takes as long to import as all other modules

        print(f"plumbline {plumbline_version()}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """A parser that exits with pytest's code for an invalid command line."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
