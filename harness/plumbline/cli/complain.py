"""Errors on a command line: their text may be a run's, which never acts on a terminal."""

from __future__ import annotations

import sys

from plumbline.report.text import printable_lines


def complain(error: BaseException | str, command: str = "plumbline") -> None:
    """Show an error."""
    print(f"{command}: {printable_lines(str(error))}", file=sys.stderr)
