"""The command ``plumbline``: run the suites, and look at, repeat and compare runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, NoReturn

from plumbline.cli.print_error import print_error
from plumbline.core.errors import PlumblineError, UsageError
from plumbline.core.exit_codes import TROUBLE, USAGE
from plumbline.machine.installed_software import plumbline_version

COMMANDS: Final = {
    "new-subject": "write an adapter that runs at once, to be replaced by your trainer step by step",
    "new-workload": "write a training problem of your own that runs at once, to be replaced step by step",
    "check": "check a training script of your own, unmodified: gradients, updates, data, on every rank",
    "smoke": "train a tiny cell, and tell a wrong adapter from a wrong trainer",
    "run": "run a suite from any folder: conformance, performance or detection",
    "subjects": "list the trainers that ship; install one of an exact version beside this environment",
    "judge": "judge a run's traces again, without training, and show what changed",
    "report": "write a run's pages and tables again, or print one of them",
    "show": "show everything that a run knows about one cell",
    "history": "make a small site about many runs: what changed when, badges, an Atom feed",
    "compare": "compare two runs, or the cells of one: outcomes, speed, memory",
    "submit": "run the matrix on a SLURM, Kubernetes or Ray cluster, split over tasks",
    "hunt": "search for training problems on which a trainer is wrong, and shrink what is found",
    "power": "measure how small an error of a gradient, an update or a reported loss is noticed",
    "doctor": "check whether this machine is fit for a run: devices, links, communication, limits, versions",
}
"""What each command does, in a line. Module ``plumbline.cli.x_y`` has command ``x-y``; its ``add_to`` declares it."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(sys.argv[1:] if arguments is None else arguments)
    try:
        return int(options.do(options))
    except UsageError as error:
        print_error(error)
        return USAGE
    except (PlumblineError, OSError) as error:
        print_error(error)
        return TROUBLE
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as a shell does


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line with the arguments of its command alone, so that only its module is imported."""
    parser = _Parser(prog="plumbline", description=__doc__)
    parser.add_argument("--version", action="version", version=f"plumbline {plumbline_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, description in COMMANDS.items():
        if arguments and arguments[0] == name:
            import_module(f"plumbline.cli.{name.replace('-', '_')}").add_to(commands)
        else:
            commands.add_parser(name, help=description)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        # Not parse_args, which shows the usage of plumbline and not that of the command.
        hint = getattr(options, "hint_for_unknown", "")
        commands.choices[arguments[0]].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return options


class _Parser(argparse.ArgumentParser):
    """A parser with an exit code of its own for a wrong command line, the same as pytest's."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
