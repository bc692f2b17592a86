"""``plumbline history``: write a static site about many runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from plumbline.cli.arguments import print_error


def add_to(commands: Any) -> None:
    command = commands.add_parser("history", description=history.__doc__)
    command.add_argument("folder", type=Path, metavar="FOLDER", help="a folder of runs, for example reports")
    command.add_argument(
        "-o", "--output", type=Path, metavar="SITE", help="folder of the site (default: FOLDER/history)"
    )
    command.set_defaults(do=history)


def history(options: argparse.Namespace) -> int:
    """Make a small site about all runs in a folder: what changed, when, and what else was different then.

    It has a row for each cell and each measured figure, and a badge for each subject, all with relative
    addresses: it works from a disk, as an artifact of CI and on a static host.
    """
    from plumbline.report.history.site import INDEX, write_site

    site = options.output or options.folder / "history"
    found = write_site(options.folder, site)
    for reason in found.unreadable:
        print_error(f"skipped: {reason}")
    print(site / INDEX)
    return 0
