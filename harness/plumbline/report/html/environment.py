"""What every page is rendered with: text from outside is escaped and never acts as markup."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from plumbline.report.text import compact, counted, digits, in_words, printable_lines, shortened, x_noise


def page_environment(*packages: str) -> Environment:
    """Return an environment for the templates of these packages, which may extend ``base.html.jinja``."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "plumbline.report.html")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {
        "compact": compact,
        "counted": counted,
        "digits": digits,
        "in_words": in_words,
        "shortened": shortened,
        "x_noise": x_noise,
    }
    return environment


def _shown(value: object) -> object:
    return printable_lines(value) if type(value) is str else value
