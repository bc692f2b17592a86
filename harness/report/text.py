"""Text and numbers for people. What comes from a run is somebody else's text and never acts as markup."""

from __future__ import annotations

import math
import re
import unicodedata

_TERMINAL_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Controls, invisible formatting (which can turn the direction of text) and what UTF-8 cannot write.
_UNPRINTABLE = ("Cc", "Cf", "Cs")

_AS_ENTITY = {sign: f"&#{ord(sign)};" for sign in "\\|`"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_AS_ESCAPE = {sign: f"\\{sign}" for sign in "*_~$[]#"}
_MARKDOWN = str.maketrans(_AS_ENTITY | _AS_ESCAPE)


def printable(text: str) -> str:
    """Return the text on one line, without anything that a terminal would obey."""
    line = " ".join(_TERMINAL_SEQUENCE.sub("", text).split())
    return "".join(sign for sign in line if unicodedata.category(sign) not in _UNPRINTABLE)


def printable_lines(text: str) -> str:
    """Return the text on its lines, tabs as blanks, without anything that a terminal would obey."""
    if text.isprintable():
        return text
    lines = _TERMINAL_SEQUENCE.sub("", text).expandtabs(4).splitlines()
    return "\n".join("".join(sign for sign in line if unicodedata.category(sign) not in _UNPRINTABLE) for line in lines)


def shortened(text: str, length: int) -> str:
    """Return at most ``length`` characters of the text, with an ellipsis where something is left out."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def markdown(text: str) -> str:
    """Return Markdown that shows the text as it is, also inside a table."""
    return printable(text).translate(_MARKDOWN)


def markdown_code(text: str) -> str:
    """Return a code span that shows the text as it is. Not for tables: there a pipe ends even a code span."""
    line = printable(text)
    if not line:
        return ""
    fence = "`" * (1 + max(map(len, re.findall(r"`+", line)), default=0))
    blank = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{blank}{line}{blank}{fence}"


def markdown_table_code(text: str) -> str:
    """Return a code span for a table's cell, or escaped text where a code span would break the table."""
    return markdown(text) if re.search(r"[\\|`]", text) else markdown_code(text)


def compact(number: float) -> str:
    """Return a number in few signs: ``0.8``, ``57``, ``2e6``, ``inf``; nothing for a missing one (NaN)."""
    if math.isnan(number):
        return ""
    if math.isinf(number):
        return str(number)
    size = abs(number)
    if size >= 9999.5:
        mantissa, exponent = f"{number:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 9.95:
        return f"{number:.0f}"
    if size >= 1e-3 or size == 0:
        return f"{number:.2g}"
    mantissa, exponent = f"{number:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
