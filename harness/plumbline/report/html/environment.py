"""What every page is rendered with: text from outside is escaped and never acts as markup."""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from plumbline.core.numbers import compact, x_noise
from plumbline.report.text import counted, digits, in_words, printable_lines, shortened


def page_environment(*packages: str) -> Environment:
    """Return an environment for the templates of these packages, which may extend ``base.html.jinja``."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "plumbline.report.html")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable_lines(value) if type(value) is str else value,
    )
    filters: tuple[Callable[..., str], ...] = (compact, counted, digits, in_words, shortened, x_noise)
    environment.filters |= {one.__name__: one for one in filters}
    return environment
