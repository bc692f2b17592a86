"""Writes the verdict to files, each completely or not at all. Imports only what the requested files need."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from plumbline.core.errors import PlanError

if TYPE_CHECKING:
    from plumbline.check.command.checked_command import CheckedCommand
    from plumbline.check.verdict.verdict import Verdict

REPORT: Final = ("verdict.html", "verdict.json", "verdict.sarif", "verdict.md", "code-quality.json", "badge.svg")


def make_folder(folder: Path) -> None:
    """Create the folder of a report; raise ``PlanError`` if it cannot be created or its files cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--report-dir: cannot create {folder}: {error.strerror}") from error
    refuse_unwritable(*(folder / name for name in REPORT))


def refuse_unwritable(*files: Path | None) -> None:
    """Refuse files that cannot be written, before a training starts.

    It raises ``PlanError`` if a path is a folder, if its parent folder is missing, or if it cannot be written.
    """
    for file in filter(None, files):
        if file.is_dir():
            raise PlanError(f"{file} is a folder: name a file")
        if not file.absolute().parent.is_dir():
            raise PlanError(f"there is no folder {file.absolute().parent} for {file.name}: create it first")
        if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise PlanError(f"{file} cannot be written: choose another place")


def write_files(
    checked: CheckedCommand, verdict: Verdict, *, html: Path | None, json: Path | None, sarif: Path | None = None
) -> None:
    """Write the requested files with ``write_whole``."""
    if json is not None:
        from plumbline.check.report.json_file import as_json

        write_whole(json, as_json(checked, verdict))
    if sarif is not None:
        from plumbline.check.report.lines import check_sarif

        write_whole(sarif, check_sarif(checked, verdict))
    if html is not None:
        from plumbline.check.report.page import verdict_page

        write_whole(html, verdict_page(checked, verdict))


def write_report(folder: Path, checked: CheckedCommand, verdict: Verdict) -> None:
    """Write the verdict to ``folder`` in every format. ``REPORT`` has the file names."""
    from plumbline.check.report.lines import annotations_on, verdict_markdown
    from plumbline.report.annotations import code_quality
    from plumbline.report.badge import verdict_badge

    html, json, sarif, markdown, quality, image = (folder / name for name in REPORT)
    write_files(checked, verdict, html=html, json=json, sarif=sarif)
    write_whole(markdown, verdict_markdown(checked, verdict))
    write_whole(quality, code_quality(annotations_on(checked)))
    write_whole(image, verdict_badge(verdict.answer.value))


def write_whole(file: Path, text: str) -> None:
    """Write a file completely, or leave it as it was.

    It raises ``OSError`` if the file cannot be written.
    """
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
