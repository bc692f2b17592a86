"""Renders programs: a subject's template, in ``programs/`` beside its adapter, extends ``program.py.jinja``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined, TemplateNotFound

from plumbline.hunt.program.layers import NotExpressedError
from plumbline.hunt.program.problem import Problem

MOST_LINES = 80
"""Lines of a program that are not empty."""


class NoTemplateError(NotExpressedError):
    """The subject has no template; ``advice`` says what to add."""

    def __init__(self, file: Path) -> None:
        super().__init__("the subject has no template")
        self.advice = f"Write `{file}` with the trainer's own lines. `plumbline/subjects/programs/` has examples."


def render(problem: Problem, folder: Path, title: str) -> str:
    """Return a program that trains a problem with the subject whose adapter is in ``folder``.

    It raises ``NoTemplateError`` without a template, ``NotExpressedError`` where the program would be wrong or too
    long.
    """
    name = f"{problem.cell.subject}.py.jinja"
    try:
        template = _environment(folder / "programs").get_template(name)
    except TemplateNotFound:
        raise NoTemplateError(folder / "programs" / name) from None
    return _checked(template.render(p=problem, title=title, alone=False))


def render_by_hand(problem: Problem, title: str) -> str:
    """Return a program that trains a problem by hand on one device, and prints the weights; see ``render``."""
    return _checked(_environment(Path()).get_template("program.py.jinja").render(p=problem, title=title, alone=True))


def _checked(text: str) -> str:
    lines = sum(1 for line in text.splitlines() if line.strip())
    if lines > MOST_LINES:
        raise NotExpressedError(f"the program would have {lines} lines")
    return text.strip("\n") + "\n"


@cache
def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(folder), PackageLoader("plumbline.hunt.program", "")]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["cannot"] = _cannot
    return environment


def _cannot(what: str) -> None:
    raise NotExpressedError(what)
