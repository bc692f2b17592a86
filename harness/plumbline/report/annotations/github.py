"""Annotations as commands to GitHub Actions, which shows each at its line of a pull request.

A runner reads them from a step's output: ``::error file=…,line=…,title=…::message``.
"""

from __future__ import annotations

from collections.abc import Iterable

from plumbline.report.annotations.annotation import Annotation
from plumbline.report.text import printable_lines

_IN_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_IN_PROPERTY = {**_IN_MESSAGE, **str.maketrans({":": "%3A", ",": "%2C"})}


def github_commands(annotations: Iterable[Annotation]) -> str:
    """Return a line for each annotation. Text from outside cannot begin a line, nor end a property."""
    return "".join(f"{_command(one)}\n" for one in annotations)


def _command(one: Annotation) -> str:
    place = {} if one.source is None else {"file": one.source[0], "line": str(one.source[1])}
    properties = {**place, "title": one.title}
    written = ",".join(f"{name}={printable_lines(value).translate(_IN_PROPERTY)}" for name, value in properties.items())
    return f"::error {written}::{printable_lines(one.message).translate(_IN_MESSAGE)}"
