"""Shared by the commands: declaring a command, types of arguments, and printing an error.

A project can put options that it repeats on every command line in ``[tool.plumbline.COMMAND]`` of its pyproject.toml.
"""

from __future__ import annotations

import argparse
import difflib
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

from plumbline.check.command.running import SEPARATOR
from plumbline.core.errors import PlanError
from plumbline.report.text import in_toml, printable_lines

ACCELERATOR: Final[Any] = {"metavar": "TYPE", "default": "auto"}
JSON: Final[Any] = {"action": "store_true", "help": "print everything as JSON, for programs"}
RUN: Final = "a run's folder, for example reports/latest"


def declare(commands: Any, name: str, do: Callable[[argparse.Namespace], int], **further: Any) -> Any:
    """Declare the command that calls ``do``, described by its docstring; return the function that adds arguments."""
    parser = commands.add_parser(name, **{"description": do.__doc__, **further})
    parser.set_defaults(do=do)
    return parser.add_argument


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        with suppress(ValueError):
            if int(text) >= least:
                return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, not {text}")

    return number


def duration(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")


def path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("is empty: give a path")
    return Path(text)


def print_error(error: BaseException | str) -> None:
    # The text may come from a recorded run, so control characters are escaped.
    print(f"plumbline: {printable_lines(str(error))}", file=sys.stderr)


FILE: Final = "pyproject.toml"
COMMANDS: Final = ("check", "compare", "run")
"""The commands that have a table."""

COMMAND: Final = "command"
"""The setting of ``check`` for the words that follow ``--`` on a command line."""

IGNORE: Final = "--no-settings"
IGNORE_HELP: Final = f"ignore [tool.plumbline] in the {FILE} of the current folder"


class Setting(NamedTuple):
    """A setting: its value as ``written`` in the file, and as the ``value`` of the option ``dest``."""

    dest: str
    written: Any
    value: Any


def read_settings(command: str, parser: argparse.ArgumentParser) -> dict[str, Setting]:
    """Return the settings of a command in the current folder's file, by name; empty without a file.

    Args:
        command: one of ``COMMANDS``.
        parser: has the options of the command.

    Raises:
        PlanError: the file cannot be read, a setting is unknown, or its value is not one that the option takes.
    """
    return {name: _setting(command, parser, name, value) for name, value in _read_table(command).items()}


def _read_table(command: str) -> dict[str, Any]:
    file = Path(FILE)
    if not file.is_file():
        return {}
    import tomllib  # type: ignore[import-not-found, unused-ignore]  # commands run on Python 3.11

    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{FILE} cannot be read: {error}; {IGNORE} ignores it") from error
    tools = content.get("tool")
    tables = tools.get("plumbline", {}) if isinstance(tools, dict) else {}
    if not isinstance(tables, dict):
        raise PlanError(f"{FILE}: [tool.plumbline] is not a table")
    for name, table in tables.items():
        if name not in COMMANDS or not isinstance(table, dict):
            raise PlanError(
                f"{FILE}: [tool.plumbline] has {name!r}, which is not a table of settings: "
                f"put settings in {', '.join(map(_table, COMMANDS))}"
            )
    return dict(tables.get(command, {}))


def with_settings(
    parse: Callable[[], argparse.Namespace], parser: argparse.ArgumentParser, command: str
) -> argparse.Namespace:
    """Return the options that ``parse`` finds with ``parser`` on a command line, completed by settings of the file.

    ``settings`` of the result has the settings that were used, as written in the file. Raises what ``read_settings``
    raises.
    """
    settings = {} if parse().no_settings else read_settings(command, parser)
    # With these defaults, an option that is not None was given on the command line.
    parser.set_defaults(**{one.dest: None for one in settings.values()})
    options = parse()
    used = {name: one for name, one in settings.items() if getattr(options, one.dest) in (None, [])}
    for one in used.values():
        setattr(options, one.dest, one.value)
    options.settings = {name: one.written for name, one in used.items()}
    return options


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command line."""
    words = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else []
        else:
            words += [f"--{name}={one}" for one in (value if isinstance(value, list) else [value])]
    return words


def _setting(command: str, parser: argparse.ArgumentParser, name: str, value: Any) -> Setting:
    actions = {_key(action): action for action in parser._actions if _key(action)}
    if name not in actions:
        close = difflib.get_close_matches(name, actions, 1)
        hint = f"; did you mean {close[0]}?" if close else f"; plumbline {command} --help lists the options"
        raise PlanError(f"{FILE}: {_table(command)} has no setting {name!r}{hint}")
    action = actions[name]
    where = f"{FILE}: {_table(command)}: {name}"
    kind, description = _kind(action)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise PlanError(f"{where} must be {description}, not {in_toml(value)}")
    if isinstance(value, list) and not all(isinstance(one, str) for one in value):
        raise PlanError(f"{where} must be {description}, not {in_toml(value)}")
    if action.choices and value not in action.choices:
        raise PlanError(f"{where} must be one of {', '.join(map(str, action.choices))}, not {in_toml(value)}")
    try:
        return Setting(action.dest, value, _converted(action, value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise PlanError(f"{where} = {in_toml(value)}: {error}") from error


def _key(action: argparse.Action) -> str:
    """Return the setting's name, which is the long option without dashes; "" for options that no file can set."""
    if isinstance(action, argparse._HelpAction) or IGNORE in action.option_strings:
        return ""
    if not action.option_strings:
        return COMMAND if action.dest == COMMAND else ""
    return action.option_strings[-1].lstrip("-")


def _kind(action: argparse.Action) -> tuple[type | tuple[type, ...], str]:
    if action.nargs == 0:
        return bool, "true or false"
    if isinstance(action, argparse._AppendAction):
        return list, "a list of strings"
    convert = action.type
    returned = convert if isinstance(convert, type) else get_type_hints(convert).get("return") if convert else str
    if returned is int:
        return int, "a whole number"
    return ((int, float), "a number") if returned is float else (str, "a string")


def _converted(action: argparse.Action, value: Any) -> Any:
    if action.dest == COMMAND and not action.option_strings:
        return [SEPARATOR, *shlex.split(value)]
    return action.type(str(value)) if callable(action.type) else value


def _table(command: str) -> str:
    return f"[tool.plumbline.{command}]"
