"""The Jinja environment of every page. Text from outside is escaped and never acts as markup."""

from __future__ import annotations

import re
from collections.abc import Callable

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from plumbline.core.numbers import compact, counted, x_noise
from plumbline.report.text import digits, in_words, printable_lines, shortened

_BEFORE_ITS_UNIT = re.compile(r"(?<=\d) (?=%|×)")
_OPTION = re.compile(r"(?<!\S)--?[a-z][\w-]*")


def page_environment(*packages: str) -> Environment:
    """Return an environment for the templates of these packages, which can extend ``base.html.jinja``."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "plumbline.report.html")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: _prose(value) if type(value) is str else value,
    )
    filters: tuple[Callable[..., str], ...] = (code, compact, counted, digits, in_words, shortened, x_noise)
    environment.filters |= {one.__name__: one for one in filters}
    return environment


def code(text: str) -> Markup:
    """Return text for copying: unchanged, and without line breaks inside an option."""
    return Markup(_OPTION.sub(r'<span class="option">\g<0></span>', str(escape(printable_lines(text)))))


def _prose(text: str) -> str:
    """Return text with no-break spaces between figures and their units."""
    return _BEFORE_ITS_UNIT.sub("\N{NO-BREAK SPACE}", printable_lines(text))
