"""Writes the generated parts of the documentation: tables of options, commands and workloads.

    python ci/docs.py            # rewrites the parts between the markers in docs/, and docs/llms.txt
    python ci/docs.py --check    # exits with 1 if one of them is out of date

A generated part is between ``<!-- generated: NAME -->`` and ``<!-- end -->``. Its text comes from the code: help texts
of the parsers, and the attribute ``exposes`` of each workload.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

import plumbline.cli.suites as suite_commands
from plumbline.cli import main
from plumbline.pytest_plugin.plugin import add_options
from plumbline.workloads import PERFORMANCE, WORKLOADS

DOCS = Path(__file__).resolve().parent.parent / "docs"
LLMS = "llms.txt"
PART = re.compile(r"(?<=<!-- generated: )(?P<name>[a-z ]+) -->\n(?P<text>.*?)(?=<!-- end -->)", re.DOTALL)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(header)
    lines = [names, ["---"] * len(names), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def arguments(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        value = _value(action)
        names = [f"`{f'{name} {value}'.strip()}`" for name in action.option_strings] or [f"`{value}`"]
        rows.append((", ".join(names), (action.help or "") % vars(action)))
    return table(("option", "meaning"), rows) if rows else ""


def _value(action: argparse.Action) -> str:
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest
    name = str(action.metavar or choices)
    if action.nargs in ("?", "*", argparse.REMAINDER):
        return f"[{name} ...]" if action.nargs != "?" else f"[{name}]"
    return "" if action.nargs == 0 else name


def run_options() -> str:
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser.add_argument)
    return arguments(parser)


def commands() -> str:
    """Return a section for each command of ``plumbline``: description, arguments, exit codes."""
    return "\n".join(_sections("plumbline", command_parser()))


def command_parser() -> argparse.ArgumentParser:
    """Return a parser with every command and its options."""
    return main.command_parser(*main.COMMANDS)[0]


def _sections(name: str, parser: argparse.ArgumentParser) -> Iterable[str]:
    (choices,) = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for word, command in sorted(choices.items()):
        title = f"{name} {word}"
        nested = any(isinstance(action, argparse._SubParsersAction) for action in command._actions)
        if word == "run":
            yield f"### {title}\n\n`plumbline run [SUITE ...] [OPTIONS]`: {_plain(suite_commands.run.__doc__)}\n"
            continue
        parts = [f"### {title}\n", _described(command.description or ""), arguments(command)]
        if command.epilog:
            parts.append(_block(command.epilog))
        yield "\n".join(part for part in parts if part)
        if nested:
            yield from _sections(title, command)


def _described(text: str) -> str:
    """Return a description as Markdown; indented lines become a code block."""
    blocks = inspect.cleandoc(text).replace("``", "`").split("\n\n")
    return "\n".join(_block(one) if one.startswith(" ") else f"{one}\n" for one in blocks)


def _block(text: str) -> str:
    return f"```text\n{inspect.cleandoc(text)}\n```\n"


def _plain(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("``", "`")


def workloads() -> str:
    wide = [(f"`{name}`", one.exposes) for name, one in WORKLOADS.items() if not one.narrow]
    return table(("workload", "exposes"), wide)


def narrow_workloads() -> str:
    rows = [
        (f"`{name}`", one.exposes, ", ".join(sorted(one.needs)) or "–", " ".join(one.precisions))
        for name, one in WORKLOADS.items()
        if one.narrow
    ]
    return table(("workload", "exposes", "needs", "precisions"), rows)


def performance_workloads() -> str:
    rows = [(f"`{name}`", _plain(type(one).__doc__).split("\n\n")[0]) for name, one in PERFORMANCE.items()]
    return table(("workload", "what it is"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "run options": run_options,
    "commands": commands,
    "workloads": workloads,
    "narrow workloads": narrow_workloads,
    "performance workloads": performance_workloads,
}


def up_to_date(page: str) -> str:
    """Return ``page`` with its generated parts rewritten."""
    return PART.sub(lambda part: f"{part['name']} -->\n\n{PARTS[part['name']]().strip()}\n\n", page)


def llms() -> str:
    """Return ``llms.txt``: what Plumbline is, and the purpose of each page."""
    site = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())
    index = (DOCS / "index.md").read_text()
    goals = {
        page: goal
        for goal, pages in re.findall(r"^\| ([^|]+) \| (.*\.md\).*) \|$", index, re.MULTILINE)
        for page in re.findall(r"\]\(([\w-]+\.md)", pages)
    }
    introduction = " ".join(index.split("\n\n")[1].split())
    lines = [f"# {site['site_name']}\n", f"> {site['site_description']}\n", f"{introduction}\n"]
    for entry in site["nav"]:
        ((section, pages),) = entry.items()
        below = [entry] if isinstance(pages, str) else pages
        lines += [] if below == [entry] else [f"\n## {section}\n"]
        for title, page in (item for one in below for item in one.items()):
            lines.append(f"- [{title}]({page})" + (f": to {goals[page]}" if page in goals else ""))
    return "\n".join(lines) + "\n"


def run(arguments: list[str] | None = None) -> int:
    """Rewrite the generated parts, or name the pages that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    pages = {path: path.read_text() for path in sorted(DOCS.glob("*.md"))}
    renewed = {path: up_to_date(text) for path, text in pages.items()} | {DOCS / LLMS: llms()}
    stale = [path for path, text in renewed.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(DOCS.parent)} {'is out of date: run python ci/docs.py' if check else 'written'}")
        if not check:
            path.write_text(renewed[path])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(run())
