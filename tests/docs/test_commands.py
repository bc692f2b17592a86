"""Every command in the documentation works: it is run here, or parsed by the program's own parser."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import scipy.special  # noqa: F401 - pytester drops what a test imports, and numpy.fft cannot be loaded twice
import tomllib

from plumbline.cli import main
from plumbline.core.backend import BACKENDS
from plumbline.core.precision import PRECISIONS
from plumbline.subjects.load import SHORT_NAMES
from plumbline.workloads import EVERY

ROOT = Path(__file__).parents[2]
PAGES = (
    *sorted(ROOT.glob("docs/*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")),
)
BLOCK = re.compile(r"^( *)```(?:bash|console)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:python ci/|ci/|plumbline |pytest |zensical )[^`\n]*)`")
ENVIRONMENT = ".venv/bin/"


@dataclass(frozen=True)
class Command:
    """One program with its arguments, as a reader types it; ``page`` is the page that has it."""

    page: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0].removeprefix(ENVIRONMENT)

    @property
    def arguments(self) -> list[str]:
        return list(self.words[1:])

    def __str__(self) -> str:
        return shlex.join(self.words)


def in_blocks(path: Path) -> list[Command]:
    """Return the commands of a page's shell blocks; ``a && b`` are two commands."""
    lines = [line.strip() for _, block in BLOCK.findall(path.read_text()) for line in block.splitlines()]
    parts = [part for line in lines if line and not line.startswith("#") for part in line.split(" && ")]
    return [
        Command(path.name, _program_first(shlex.split(part.removeprefix("$ ").partition(" > ")[0]))) for part in parts
    ]


def _program_first(words: list[str]) -> tuple[str, ...]:
    """Remove variables set for a command, and treat ``python -m pytest`` as ``pytest``."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return ("pytest", *words[3:]) if words[:3] == ["python", "-m", "pytest"] else tuple(words)


def in_text(path: Path) -> list[Command]:
    """Return commands in a page's text, without those that have a placeholder (``RUN``, ``FILE.py``, …)."""
    found = INLINE.findall(BLOCK.sub("", path.read_text()))
    typed = [text for text in found if not re.search(r"[A-Z]{2,}|…|<|\[", text) and text != "pytest suites/"]
    return [Command(path.name, tuple(shlex.split(text))) for text in typed]


COMMANDS = list({str(one): one for path in PAGES for one in (*in_blocks(path), *in_text(path))}.values())

RUN_HERE = re.compile(
    r"plumbline (new-subject|new-workload|report|show|judge|history|compare reports/(A reports/B|A --by))\b.* "
)
"""Commands that take a second or two, and are run in the order of the pages."""

COMMAND_PARSER = runpy.run_path(str(ROOT / "ci" / "docs.py"))["command_parser"]
NAMES = {"workloads": EVERY, "backends": BACKENDS, "precisions": PRECISIONS}
SHELL = ("source", "eval")


def is_run_here(command: Command) -> bool:
    return len(command.words) > 2 and bool(RUN_HERE.match(f"{command} "))


@pytest.fixture(scope="module", autouse=True)
def _imports_of_the_parser():
    """Import what the parser needs once: pytester drops what a test imports, and each test would import it again.

    Programs of ``ci/`` import torch._dynamo, which cannot be imported twice.
    """
    COMMAND_PARSER()
    importlib.import_module("torch._dynamo")


@pytest.mark.parametrize("command", [one for one in COMMANDS if not is_run_here(one)], ids=str)
def test_it_is_a_command_that_the_program_takes(command, pytester, monkeypatch, capsys):
    if command.program in CHECKED_BY:
        CHECKED_BY[command.program](command, pytester)
    elif command.program in ("python", "python3") or command.program.startswith("ci/"):
        _program_of_the_checkout(command, monkeypatch, capsys)
    else:
        pytest.fail(f"{command.page} has a command that nothing checks: {command}")


@pytest.fixture(scope="module")
def a_folder_with_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    for name in ("A", "B"):
        shutil.copytree(ROOT / "reports" / "example-simulated", folder / "reports" / name)
    (folder / "reports" / "latest").symlink_to("A")
    return folder


@pytest.mark.parametrize("command", [one for one in COMMANDS if is_run_here(one)], ids=str)
def test_it_runs(command, a_folder_with_runs, monkeypatch, capsys):
    monkeypatch.chdir(a_folder_with_runs)
    code = main.main(command.arguments)
    # dp and ddp differ, and the example has no traces.
    expected = 1 if "--by" in command.words else 2 if "judge" in command.words else 0
    assert code == expected, capsys.readouterr().err


def _pytest(command, pytester):
    """Let pytest parse it, with the plugin that its path loads, and check that the named paths exist."""
    _parsed_by_pytest(command.arguments, pytester)


def _plumbline(command, pytester):
    if command.words[1] == "run":
        suites = [word for word in command.words[2:3] if not word.startswith("-")]
        rest = command.arguments[1 + len(suites) :]
        _parsed_by_pytest([f"suites/{suites[0] if suites else 'conformance'}", *rest], pytester)
    elif len(command.words) == 2:  # only mentioned
        with pytest.raises(SystemExit) as ended:
            main.main([command.words[1], "--help"])
        assert ended.value.code == 0
    else:
        COMMAND_PARSER().parse_args(command.arguments)


def _parsed_by_pytest(arguments, pytester):
    if arguments[0].startswith("-"):
        arguments = ["suites/", *arguments]
    from_here = [str(ROOT / word) if (ROOT / word).exists() else word for word in arguments]
    for word in arguments:
        assert not word.startswith(("suites", "tests")) or (ROOT / word).exists(), f"there is no {word}"
    for index, word in enumerate(arguments[1:]):
        if arguments[index] == "-p":
            pytester.makepyfile(**{word: ""})  # a reader's own file
            pytester.syspathinsert()
    config = pytester.parseconfig("--rootdir", str(ROOT), *from_here)  # an unknown option is a UsageError
    for option, known in NAMES.items():
        assert set((getattr(config.option, option, None) or "").split(",")) <= {*known, ""}
    for locator in getattr(config.option, "subject", None) or ():
        name = locator.partition(";")[0]
        assert name in SHORT_NAMES or name.endswith(".py"), f"there is no subject {name}"


def _program_of_the_checkout(command, monkeypatch, capsys):
    """Check that a file of ``ci/`` exists, and that its help lists every option."""
    script, *arguments = command.arguments if command.program.startswith("python") else command.words
    if script == "-m":
        assert arguments[0] in ("hatchling", "venv")  # tests/wheel runs hatchling
        return
    path = ROOT / script
    assert path.exists(), f"{command.page} names {script}, which is not there"
    if path.suffix == ".sh":
        _has_commands(path, arguments)
    elif arguments:
        monkeypatch.setattr(sys, "argv", [str(path), "--help"])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        told = capsys.readouterr().out
        assert ended.value.code == 0
        for option in (word for word in arguments if word.startswith("--")):
            assert re.search(rf"{option}\b", told), f"{script} has no option {option}"


def _pip(command, pytester):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"\.\[(.*)\]", str(command))
    assert {*extras} <= {*project["optional-dependencies"]}
    assert "-c" not in command.words or (ROOT / command.words[command.words.index("-c") + 1]).is_file()


def _tool_of_ci(command, pytester):
    """Look up the linters' commands in ``.ci/run``, which runs them."""
    assert str(command) in (ROOT / ".ci" / "run").read_text()


def _zensical(command, pytester):
    """``test_pages.py`` runs ``zensical build --strict``; ``serve`` would not end."""
    assert command.words[1] in ("build", "serve")


def _shell(command, pytester):
    """``source`` names a script of the environment; ``eval`` a program of the checkout, in ``$(…)``."""
    script, *arguments = shlex.split(command.words[1].strip("$()"))
    if not script.startswith(ENVIRONMENT):
        _has_commands(ROOT / script, arguments)


def _has_commands(script, words):
    for word in words:
        assert re.search(rf"^ *{word}\) ", script.read_text(), re.MULTILINE), f"{script} has no command {word}"


def _script_of_ci(command, pytester):
    assert (ROOT / command.program).stat().st_mode & 0o100


def _pre_commit(command, pytester):
    assert (ROOT / ".pre-commit-config.yaml").is_file()


CHECKED_BY = {
    "pytest": _pytest,
    "plumbline": _plumbline,
    "pip": _pip,
    "ruff": _tool_of_ci,
    "mypy": _tool_of_ci,
    "vermin": _tool_of_ci,
    "lint-imports": _tool_of_ci,
    "zensical": _zensical,
    "pre-commit": _pre_commit,
    ".ci/run": _script_of_ci,
    **dict.fromkeys(SHELL, _shell),
}
