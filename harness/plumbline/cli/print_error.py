"""Errors of the command line."""

from __future__ import annotations

import sys

from plumbline.report.text import printable_lines


def print_error(error: BaseException | str) -> None:
    # The text may come from a recorded run, so control characters are escaped.
    print(f"plumbline: {printable_lines(str(error))}", file=sys.stderr)
