"""Programs without Plumbline that show a failure: the library's training beside the same by hand on one device.

What is a trainer's own is a template beside its adapter: ``programs/SUBJECT.py.jinja`` in the folder of the file that
declares the subject.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

from jinja2 import (
    ChoiceLoader,
    Environment,
    FileSystemLoader,
    PackageLoader,
    StrictUndefined,
    Template,
    TemplateNotFound,
)

from plumbline.hunt.program.plain_model import NotExpressedError
from plumbline.hunt.program.plain_torch import PlainTorch

MOST_LINES = 30
WIDEST = 120
INDENT = " " * 4

_IMPORTED_BY_TORCH = ("torch.nn.parallel", "torch.utils.data")


class NoTemplateError(NotExpressedError):
    """Nobody has written how the subject trains; ``advice`` says what to add."""

    def __init__(self, file: Path) -> None:
        super().__init__("a subject without a template")
        self.advice = (
            f"`{file}` would be the place: a template with the trainer's own lines, as "
            "`harness/plumbline/subjects/programs/` has them for others."
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
    name = f"{problem.cell.subject}.py.jinja"
    try:
        template = _environment(folder / "programs").get_template(name)
    except TemplateNotFound:
        raise NoTemplateError(folder / "programs" / name) from None
    return _shortest(template, title, p=problem, tolerance=tolerance, alone=False)


def one_device(problem: PlainTorch, title: str) -> str:
    """Return a program that trains a problem by hand on one device, and prints the weights that are right.

    Raises:
        NotExpressedError: the program would be wrong, or too long.
    """
    template = _environment(Path()).get_template("program.py.jinja")
    return _shortest(template, title, p=problem, alone=True)


@cache
def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(folder), PackageLoader("plumbline.hunt.program", "")]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"under": under, "remark": remark}
    environment.globals["cannot"] = _cannot
    return environment


def _shortest(template: Template, title: str, **values: object) -> str:
    """Return what a template renders, as readable as fits into the lines that a program may have."""
    reason, fewest = "a statement that is too wide", sys.maxsize
    for tight, whole_names, short in product((False, True), repeat=3):
        text = template.render(tight=tight, **values)
        if short:
            text = "from torch import nn\n" + text.replace("torch.nn.", "nn.")
        if whole_names:
            text = _with_whole_names(text)
        try:
            lines = list(_composed(text, title))
        except _TooWideError:
            continue
        if len(lines) <= MOST_LINES:
            return "\n".join(lines) + "\n"
        if len(lines) < fewest:
            reason, fewest = f"so much that the program would have {len(lines)} lines", len(lines)
    raise NotExpressedError(reason)


def under(body: str, header: str, when: bool = True) -> str:
    """Return ``body`` as the block of a statement; as it is where the statement is not needed."""
    if not when:
        return body
    return "\n".join([header, *(INDENT + line for line in body.splitlines() if line.strip())])


def remark(statements: str, words: str) -> str:
    """Return statements with a comment in the first line, where it has room."""
    first, *others = statements.strip("\n").splitlines()
    with_words = f"{first}  # {words}"
    return "\n".join([with_words if len(with_words) <= WIDEST else first, *others])


def _with_whole_names(text: str) -> str:
    """Return a program that imports no names of the modules that torch itself imports, and writes them out."""
    modules = "|".join(map(re.escape, _IMPORTED_BY_TORCH))
    names = re.findall(rf"^from ({modules}) import (.+)$", text, re.MULTILINE)
    text = re.sub(rf"^from ({modules}) import .+\n", "", text, flags=re.MULTILINE)
    for module, imported in names:
        for name in imported.split(", "):
            text = re.sub(rf"(?<![\w.]){name}\b", f"{module}.{name}", text)
    return text


def _cannot(what: str) -> None:
    """Let a template say that it does not express something."""
    raise NotExpressedError(what)


def _composed(text: str, title: str) -> Iterator[str]:
    """Yield the lines of the sections: imports in order, definitions two lines apart, and a script."""
    imports, definitions, script = text.split("%%\n")
    yield f'"""{title}"""'
    yield ""
    used = definitions + script
    yield from _sorted_imports([line for line in imports.splitlines() if line and _is_used(line, used)])
    separate = [""]
    for block in _blocks(definitions):
        yield from ("", "", *block)
        separate = ["", ""]
    yield from separate
    for line in script.splitlines():
        if line.strip():
            yield from _fitted(line)


def _is_used(statement: str, text: str) -> bool:
    """Return whether a program uses something of what an import gives it."""
    names = re.split(r", | as ", statement.partition("import ")[2])
    return any(re.search(rf"(?<![\w.]){re.escape(name)}\b", text) for name in names)


def _sorted_imports(lines: list[str]) -> Iterator[str]:
    """Yield imports as isort orders them: the standard library first, ``import`` before ``from``."""
    whole: set[str] = set()
    parts: dict[str, set[str]] = defaultdict(set)
    for line in lines:
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
    """Return a line that is too wide as ruff breaks it: at its last pair of brackets that holds something, and so on.

    Raises:
        _TooWideError: a part of it is still too wide.
    """
    if len(line) <= WIDEST:
        return [line]
    begin, end = _last_brackets(line)
    indent = line[: len(line) - len(line.lstrip())]
    inside = line[begin + 1 : end]
    made, loop, over = inside.partition(" for _ in ")
    called = line[begin] == "(" and line[begin - 1].isalnum()
    parts = [part.strip() for part in _split(inside, ",")]
    grouped = line[begin] == "(" and not called and len(parts) == 1 and not inside.endswith(",")  # and no tuple
    whole = [indent + INDENT + inside]
    if len(whole[0]) > WIDEST or not (loop or called or grouped):  # a tuple gets a line each
        exploded = [made, (loop + over).strip()] if loop else _exploded(parts, "" if grouped else ",", indent + INDENT)
        whole = [piece for one in exploded for piece in _fitted(indent + INDENT + one)]
    lines = [line[: begin + 1], *whole, indent + line[end:]]
    if any(len(one) > WIDEST for one in lines):
        raise _TooWideError
    return lines


def _exploded(parts: list[str], comma: str, indent: str) -> Iterator[str]:
    """Yield a line for each part, and for each operand of a part that is too wide."""
    for part in parts:
        operands = [part]
        for operator in ("+", "/"):
            if len(indent + part + comma) > WIDEST and len(operands) == 1:
                first, *others = _split(part, f" {operator} ")
                operands = [first, *(f"{operator} {other}" for other in others)]
        yield from operands[:-1]
        yield operands[-1] + comma


def _last_brackets(line: str) -> tuple[int, int]:
    """Return where the last brackets of a line begin and end that are not empty and not within others."""
    end = len(line)
    while (end := max(line.rfind(one, 0, end) for one in ")]}")) >= 0:
        depth, begin = 1, end
        while depth and begin > 0:
            begin -= 1
            depth += (line[begin] in ")]}") - (line[begin] in "([{")
        if begin + 1 < end:
            return begin, end
        end = begin
    raise _TooWideError


def _split(text: str, separator: str) -> Iterator[str]:
    """Yield what a separator divides, outside of brackets and quotes."""
    depth, begin, quoted = 0, 0, False
    for place, letter in enumerate(text):
        quoted ^= letter == '"'
        if quoted:
            continue
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and text.startswith(separator, place):
            yield text[begin:place]
            begin = place + len(separator)
    if text[begin:].strip():
        yield text[begin:]
