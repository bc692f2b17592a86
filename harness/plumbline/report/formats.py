"""The formats of a report: the registry that ``plumbline report --format`` and the end of a run read.

A format is a ``ReportFormat`` in a module and one line in ``FORMATS``. Your own package adds this line with
``FORMATS["yaml"] = "my_package.yaml_report:FORMAT"``, or with an entry point of the same name and value in the group
``plumbline.report_formats``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Final

from plumbline.results.files import write_text
from plumbline.results.run import Run, read_run

Render = Callable[[Run], str]
ENTRY_POINTS: Final = "plumbline.report_formats"

FORMATS: Final[dict[str, str]] = {
    "md": "plumbline.report.markdown:FORMAT",
    "html": "plumbline.report.html.page:FORMAT",
    "csv": "plumbline.report.for_programs:CSV",
    "json": "plumbline.report.for_programs:FORMAT",
    "sarif": "plumbline.report.for_programs:SARIF",
    "github": "plumbline.report.for_programs:GITHUB",
    "code-quality": "plumbline.report.for_programs:CODE_QUALITY",
}
"""``module:attribute`` of each format by name. Modules are imported when used, because some need heavy libraries."""


@dataclass(frozen=True)
class ReportFormat:
    """One way to write a report: ``render`` returns it; ``files`` are written into the run's folder at its end."""

    description: str
    render: Render
    files: Mapping[str, Render] = field(default_factory=dict)


def format_names() -> list[str]:
    return list(_locations())


def report_format(name: str) -> ReportFormat:
    """Return a format by its name; raise ``KeyError`` if there is none."""
    found = resolve_name(_locations()[name])
    assert isinstance(found, ReportFormat), f"{name}: {found!r} is not a ReportFormat"
    return found


def write_report(run_path: Path) -> None:
    """Write the files of every format into a run's folder; raise ``ResultsError`` if that is not possible."""
    run = read_run(run_path)
    for name in format_names():
        for file, render in report_format(name).files.items():
            write_text(run.path / file, render(run))


def _locations() -> dict[str, str]:
    others = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
    return {**FORMATS, **{name: place for name, place in others.items() if name not in FORMATS}}
