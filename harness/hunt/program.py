"""Programs without Plumbline that show a failure: the library's training beside the same by hand on one device.

What is a trainer's own is a template beside its adapter: ``programs/SUBJECT.py.jinja`` in the folder of the file that
declares the subject.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined, TemplateNotFound

from harness.hunt.plain_torch import NotExpressedError, PlainTorch

MOST_LINES = 30
WIDEST = 120
INDENT = " " * 4


class NoTemplateError(NotExpressedError):
    """Nobody has written how the subject trains; ``advice`` says what to add."""

    def __init__(self, file: Path) -> None:
        super().__init__("a subject without a template")
        self.advice = (
            f"Write {file}: what the subject's own training looks like, in a few lines; "
            "the templates beside Plumbline's adapters are examples."
        )


class _TooWideError(Exception):
    """A statement does not fit, however it is broken."""


def program(problem: PlainTorch, folder: Path, title: str, tolerance: str) -> str:
    """Return a program for a problem of a subject whose templates are in ``folder``.

    Args:
        problem: what is trained, on which cell.
        folder: where the adapter's folder ``programs`` is.
        title: the first sentence.
        tolerance: the difference of a weight that rounding does not explain, as it is written.

    Raises:
        NoTemplateError: there is none of this subject.
        NotExpressedError: the program would be wrong, or too long.
    """
    if problem.precision == "16":
        raise NotExpressedError("float16, with a loss scale")
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(folder / "programs"), PackageLoader("harness.hunt", "")]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"under": under, "remark": remark}
    name = f"{problem.cell.subject}.py.jinja"
    try:
        template = environment.get_template(name)
    except TemplateNotFound:
        raise NoTemplateError(folder / "programs" / name) from None
    reasons = []
    for tight, short in product((False, True), repeat=2):
        text = template.render(p=problem, cannot=_cannot, tolerance=tolerance, tight=tight)
        if short:
            text = "from torch import nn\n" + text.replace("torch.nn.", "nn.")
        try:
            lines = list(_composed(text, title))
        except _TooWideError:
            reasons.append("a statement that is too wide")
            continue
        if len(lines) <= MOST_LINES:
            return "\n".join(lines) + "\n"
        reasons.append(f"so much that the program would have {len(lines)} lines")
    raise NotExpressedError(reasons[-1])


def under(body: str, header: str, when: bool = True) -> str:
    """Return ``body`` as the block of a statement; as it is where the statement is not needed."""
    if not when:
        return body
    return "\n".join([header, *(INDENT + line if line else line for line in body.splitlines())])


def remark(statements: str, words: str) -> str:
    """Return statements with a comment in the first line, where it has room."""
    first, *others = statements.strip("\n").splitlines()
    with_words = f"{first}  # {words}"
    return "\n".join([with_words if len(with_words) <= WIDEST else first, *others])


def _cannot(what: str) -> None:
    """Let a template say that it does not express something."""
    raise NotExpressedError(what)


def _composed(text: str, title: str) -> Iterator[str]:
    """Yield the lines of the sections: imports in order, definitions two lines apart, and a script."""
    imports, definitions, script = text.split("%%\n")
    yield f'"""{title}"""'
    yield ""
    yield from _sorted_imports(imports.splitlines())
    separate = [""]
    for block in _blocks(definitions):
        yield from ("", "", *block)
        separate = ["", ""]
    yield from separate
    for line in script.splitlines():
        if line.strip():
            yield from _fitted(line)


def _sorted_imports(lines: list[str]) -> Iterator[str]:
    """Yield imports as isort orders them: the standard library first, ``import`` before ``from``."""
    whole: set[str] = set()
    parts: dict[str, set[str]] = defaultdict(set)
    for line in filter(None, lines):
        if line.startswith("import "):
            whole.add(line.removeprefix("import "))
        else:
            module, _, names = line.removeprefix("from ").partition(" import ")
            parts[module] |= set(names.split(", "))
    sections = []
    for standard in (True, False):
        section = [f"import {one}" for one in sorted(whole, key=str.lower) if _is_standard(one) is standard]
        for module in sorted(parts, key=str.lower):
            if _is_standard(module) is standard:
                section.append(f"from {module} import {', '.join(sorted(parts[module]))}")
        if section:
            sections.append(section)
    yield from sections[0]
    for section in sections[1:]:
        yield from ("", *section)


def _is_standard(module: str) -> bool:
    return module.split()[0].partition(".")[0] in sys.stdlib_module_names


def _blocks(definitions: str) -> Iterator[list[str]]:
    """Yield the lines of each definition; within one, empty lines stay."""
    block: list[str] = []
    for line in definitions.strip("\n").splitlines():
        if line and not line.startswith((" ", ")")) and block:
            yield block
            block = []
        if line or block:
            block += _fitted(line) if line else [""]
    if block:
        yield block


def _fitted(line: str) -> list[str]:
    """Return a line that is too wide as ruff breaks it: at its last pair of brackets."""
    if len(line) <= WIDEST:
        return [line]
    end = max(line.rfind(one) for one in ")]}")
    depth, begin = 0, end
    while begin >= 0:
        depth += (line[begin] in ")]}") - (line[begin] in "([{")
        if depth == 0:
            break
        begin -= 1
    indent = line[: len(line) - len(line.lstrip())]
    inner = indent + INDENT + line[begin + 1 : end].rstrip(",")
    head, tail = line[: begin + 1], indent + line[end:]
    if len(inner) <= WIDEST:
        return [head, inner, tail]
    inside = line[begin + 1 : end]
    made, loop, over = inside.partition(" for _ in ")
    parts = [made, (loop + over).strip()] if loop else [f"{one.strip()}," for one in _arguments(inside)]
    lines = [indent + INDENT + one for one in parts]
    if any(len(one) > WIDEST for one in lines):
        raise _TooWideError
    return [head, *lines, tail]


def _arguments(text: str) -> Iterator[str]:
    """Yield what commas separate, outside of brackets."""
    depth, begin = 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    if text[begin:].strip():
        yield text[begin:]
