"""Makes a release of the unreleased changes, and prints the changes of a release.

    python ci/release.py cut              # 0.2.0.dev0 becomes 0.2.0, and [Unreleased] becomes [0.2.0] with today's date
    python ci/release.py notes v0.2.0     # the tag's changes, if tag, version and CHANGELOG.md agree
    python -m hatchling version minor,dev # after the release: 0.2.0 becomes 0.3.0.dev0

The version is in CITATION.cff, where hatchling reads it. ``CONTRIBUTING.md`` has the steps of a release, and
``.github/workflows/release.yml`` does the rest when the tag is pushed. Exits with 1 if a release cannot be made.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date, datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNRELEASED = "## [Unreleased]\n"


class ReleaseError(Exception):
    """The release cannot be made; the message says why."""


def version(root: Path, *change: str) -> str:
    """Return a checkout's version; ``change`` (as ``release`` or ``minor,dev``) changes it first."""
    for words in [change, ()] if change else [()]:
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "version", *words], cwd=root, capture_output=True, text=True, check=True
        )
    return done.stdout.strip()


def section(changelog: str, name: str) -> str:
    """Return the changelog's text under ``## [name]``, or ""."""
    found = re.search(rf"^## \[{re.escape(name)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""


def cut(root: Path, today: date) -> str:
    """Remove ``.dev0`` from the version, move the unreleased changes under it, and return it."""
    file = root / "CHANGELOG.md"
    changelog = file.read_text(encoding="utf-8")
    if not section(changelog, "Unreleased"):
        raise ReleaseError("CHANGELOG.md has nothing under [Unreleased]")
    if ".dev" not in (before := version(root)):
        raise ReleaseError(f"{before} is not a development version: python -m hatchling version minor,dev")
    released = version(root, "release")
    heading = f"{UNRELEASED}\n## [{released}] - {today.isoformat()}\n"
    file.write_text(changelog.replace(UNRELEASED, heading, 1), encoding="utf-8")
    return released


def notes(root: Path, tag: str) -> str:
    """Return the changes of the release with this tag."""
    if tag != f"v{(found := version(root))}":
        raise ReleaseError(f"the tag is {tag}, and the version in CITATION.cff is {found}")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if section(changelog, "Unreleased"):
        raise ReleaseError("CHANGELOG.md has changes under [Unreleased]: they are in no release")
    if not (changes := section(changelog, found)):
        raise ReleaseError(f"CHANGELOG.md has nothing under [{found}]")
    return changes


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a release, or print one's changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cut", help="change the version and CHANGELOG.md")
    commands.add_parser("notes", help="print the changes of a release").add_argument("tag")
    options = parser.parse_args(arguments)
    try:
        print(cut(ROOT, datetime.now(timezone.utc).date()) if options.command == "cut" else notes(ROOT, options.tag))
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
