"""Text, numbers and findings for readers. Text from a run is untrusted and never acts as markup."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from plumbline.core.finding import AnyFinding, Finding
from plumbline.core.numbers import compact, x_noise

if TYPE_CHECKING:
    from plumbline.results.records import FindingRecord  # it needs pydantic

_TERMINAL_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Control characters, invisible formatting (which can reverse the direction of text) and what UTF-8 cannot encode.
_UNPRINTABLE = ("Cc", "Cf", "Cs")
_AS_ENTITY = {sign: f"&#{ord(sign)};" for sign in "\\|`"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_AS_ESCAPE = {sign: f"\\{sign}" for sign in "*_~$[]#"}
_MARKDOWN = str.maketrans(_AS_ENTITY | _AS_ESCAPE)


_SIZES: Final = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": (
        *((1024.0**power, f"{prefix}B") for power, prefix in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki"))),
        (1, "B"),
    ),
    "J": ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ")),
    "FLOP/s": (
        *((10.0**power, f"{prefix}FLOP/s") for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"))),
        (1.0, "FLOP/s"),
    ),
    "share": ((0.01, "%"),),
    "ratio": ((1.0, "×"),),
    "count": ((1.0, ""),),
}
"""Units that are shown with a prefix or a sign: size and name, largest first."""

LARGEST: Final = 1e15  # a number beyond this is written with an exponent


def printable(text: str) -> str:
    """Return the text on one line, without terminal control sequences."""
    line = " ".join(_TERMINAL_SEQUENCE.sub("", text).split())
    return "".join(sign for sign in line if unicodedata.category(sign) not in _UNPRINTABLE)


def printable_lines(text: str) -> str:
    """Return the text with its lines kept, tabs as spaces, without terminal control sequences."""
    if text.isprintable():
        return text
    lines = _TERMINAL_SEQUENCE.sub("", text).expandtabs(4).splitlines()
    return "\n".join("".join(sign for sign in line if unicodedata.category(sign) not in _UNPRINTABLE) for line in lines)


def shortened(text: str, length: int) -> str:
    """Return at most ``length`` characters of the text, up to a whole word if possible, with an ellipsis."""
    if len(text) <= length:
        return text
    kept = text[: length - 1]
    words = kept if text[length - 1].isspace() else kept.rpartition(" ")[0]
    return f"{(words if 2 * len(words) > length else kept).rstrip()}…"


def markdown(text: str) -> str:
    return printable(text).translate(_MARKDOWN)


def markdown_code(text: str) -> str:
    """Return a code span that shows the text as it is. Not for tables, where a pipe ends even a code span."""
    line = printable(text)
    if not line:
        return ""
    fence = "`" * (1 + max(map(len, re.findall(r"`+", line)), default=0))
    blank = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{blank}{line}{blank}{fence}"


def markdown_table_code(text: str) -> str:
    """Return a code span for a table's cell, or escaped text if a code span would break the table."""
    return markdown(text) if re.search(r"[\\|`]", text) else markdown_code(text)


def percent(share: float) -> str:
    """Return a share in percent. Only an exact 0 or 1 is shown as 0 % or 100 %."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return f"{min(max(100 * share, 0.1), 99.9):.1f} %".replace(".0 %", " %")


def in_two_digits(share: float) -> str:
    """Return a distance as a percentage in two digits: norms estimated from projections are not more exact."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def without_hint(message: str, hint: str | None) -> str:
    """Return what a finding's message observes, without the hint on what to change."""
    for sign in (": ", "; "):
        head, found, tail = message.rpartition(f"{sign}{hint}") if hint else ("", "", "")
        if found:
            return head + tail
    return message


def listed(names: Iterable[object], most: int = 4) -> str:
    """Return the first ``most`` names and the number of others: ``a, b, c and 4 more``."""
    every = list(map(str, names))
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def in_words(value: float, unit: str) -> str:
    """Return a figure with its unit, in three digits: ``12.3 ms``, ``87.0 %``, ``12,300 samples/s``, ``3 min 20 s``."""
    if unit == "s" and 60 <= value < LARGEST:
        minutes, seconds = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    size, name = unit_size(value, unit)
    return with_unit(digits(value / size), name)


def between(low: float, high: float, unit: str) -> str:
    """Return two bounds with their unit: ``12.1–12.5 ms``."""
    size, name = unit_size(max(low, high, key=abs), unit)
    return with_unit(f"{digits(low / size)}–{digits(high / size)}", name)


def names_itself(unit: str) -> bool:
    """Return whether the unit's name depends on the size of the figure (ms or s), so that each figure shows it."""
    return unit in _SIZES


def unit_size(value: float, unit: str) -> tuple[float, str]:
    """Return the number by which to divide ``value`` to show it, and the name of the resulting unit."""
    sizes = _SIZES.get(unit, ((1.0, unit),))
    return next((pair for pair in sizes if abs(value or 1.0) >= pair[0]), sizes[-1])


def with_unit(number: str, name: str) -> str:
    return f"× {number}" if name == "×" else f"{number} {name}".rstrip()


def digits(value: float) -> str:
    """Return a number with three significant digits and thousands separators; "" for a missing one (NaN)."""
    if not math.isfinite(value) or abs(value) >= LARGEST or 0 < abs(value) < 1e-3:
        return compact(value)
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    rounded = round(value, 2 - math.floor(math.log10(abs(value))))
    return f"{rounded:,.{places}f}"


_RULES: Final = {"l": "---", "c": ":-:", "r": "--:"}


def markdown_table(columns: Sequence[str], alignment: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. ``alignment`` has ``l``, ``c`` or ``r`` for each column; texts are Markdown already."""
    lines = [columns, [_RULES[side] for side in alignment], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def location(finding: AnyFinding) -> list[str]:
    """Return where a finding was observed, for example ``["step 0", "rank 1", "parameter head.weight"]``."""
    what = "buffer" if finding.check == "buffers" else "parameter"
    where = {"step": finding.step, "rank": finding.rank, what: finding.parameter}
    return [f"{name} {printable(str(value))}" for name, value in where.items() if value is not None]


def place_and_size(finding: Finding | FindingRecord, limit: str = "") -> str:
    """Return where and how large: ``step 0, rank 1, parameter head.weight, 57 × noise``; "" if neither is known.

    The place is the first one. If the largest error is elsewhere, it follows with its own place. ``limit`` is appended
    to the size.
    """
    if finding.error_x_noise is None:
        return ", ".join(location(finding))
    largest = x_noise(finding.error_x_noise)
    here = dict(finding.parameters).get(finding.parameter or "")
    if here is None or x_noise(here) == largest:
        return ", ".join([*location(finding), f"{largest}{limit}"])
    place = "over all steps and parameters"
    if (grid := finding.error_grid) is not None:
        cells = (
            (error, f"at step {step} in {printable(name)}")
            for name, row in zip(grid.parameters, grid.errors, strict=False)
            for step, error in zip(grid.steps, row, strict=False)
            if error is not None
        )
        place = next((there for error, there in cells if x_noise(error) == largest), place)
    return f"{', '.join([*location(finding), x_noise(here)])}{limit}; largest {largest} {place}"


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """Return the options from the project's file, with their values; "" if there are none."""
    values = ", ".join(f"{name} = {in_toml(value)}" for name, value in settings.items())
    return f"settings of pyproject.toml: {values}" if settings else ""


def in_toml(value: Any) -> str:
    """Return a string, number, boolean or list of these as TOML. Any other value is written approximately."""
    return json.dumps(value, ensure_ascii=False, default=str)
