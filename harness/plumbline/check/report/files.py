"""Writes the verdict to files, each completely or not at all. Imports only what the requested files need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from plumbline.core.errors import PlanError
from plumbline.report.output_file import refuse_file_as_folder, refuse_unwritable, write_output

if TYPE_CHECKING:
    from plumbline.check.command.checked_command import CheckedCommand
    from plumbline.check.verdict.verdict import Verdict

REPORT: Final = ("verdict.html", "verdict.json", "verdict.sarif", "verdict.md", "code-quality.json", "badge.svg")


def make_folder(folder: Path) -> None:
    """Create the folder of a report; raise ``PlanError`` if it cannot be created or its files cannot be written."""
    refuse_file_as_folder("--report-dir", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--report-dir: cannot create {folder}: {error.strerror}; choose another place") from error
    for name in REPORT:
        refuse_unwritable("--report-dir", folder / name)


def write_files(
    checked: CheckedCommand, verdict: Verdict, *, html: Path | None, json: Path | None, sarif: Path | None = None
) -> None:
    if json is not None:
        from plumbline.check.report.json_file import as_json

        write_output(json, as_json(checked, verdict))
    if sarif is not None:
        from plumbline.check.report.lines import check_sarif

        write_output(sarif, check_sarif(checked, verdict))
    if html is not None:
        from plumbline.check.report.page import verdict_page

        write_output(html, verdict_page(checked, verdict))


def write_report(folder: Path, checked: CheckedCommand, verdict: Verdict) -> None:
    """Write the verdict to ``folder`` in every format. ``REPORT`` has the file names."""
    from plumbline.check.report.lines import annotations_on, verdict_markdown
    from plumbline.report.annotations import code_quality
    from plumbline.report.badge import verdict_badge

    html, json, sarif, markdown, quality, image = (folder / name for name in REPORT)
    write_files(checked, verdict, html=html, json=json, sarif=sarif)
    write_output(markdown, verdict_markdown(checked, verdict))
    write_output(quality, code_quality(annotations_on(checked)))
    write_output(image, verdict_badge(verdict.answer.value))
