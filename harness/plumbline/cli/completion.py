"""``plumbline completion``: a script that lets a shell complete commands, options and files."""

from __future__ import annotations

import argparse
from typing import Any

from plumbline.cli.arguments import declare
from plumbline.core.errors import PlanError


def add_to(commands: Any) -> None:
    shells = "the shell that reads the script"
    declare(commands, "completion", completion)("shell", choices=("bash", "zsh", "fish"), help=shells)


def completion(options: argparse.Namespace) -> int:
    """Print a script that completes Plumbline's commands and options in a shell. It needs shtab.

      plumbline completion bash > ~/.local/share/bash-completion/completions/plumbline
      plumbline completion zsh > FOLDER_OF_FPATH/_plumbline
      plumbline completion fish > ~/.config/fish/completions/plumbline.fish

    The script does not start Python. Generate it again after each update of Plumbline.
    """
    try:
        import shtab  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        raise PlanError("completion needs shtab: pip install shtab") from error
    from plumbline.cli.main import COMMANDS, command_parser
    from plumbline.cli.suites import run_parser

    parser, commands = command_parser(*COMMANDS)
    commands.choices["run"] = run_parser()  # the usual parser passes all words to pytest
    for name, one in commands.choices.items():
        one.description = COMMANDS[name]
        for action in one._actions:
            if not action.choices and action.nargs != 0:
                action.complete = shtab.FILE
    print(shtab.complete(parser, shell=options.shell))
    return 0
