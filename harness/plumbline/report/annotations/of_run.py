"""The annotations of a run, one for each cause of each subject, and the formats that have them."""

from __future__ import annotations

from plumbline.report.annotations.annotation import Annotation, annotate
from plumbline.report.annotations.github import github_commands
from plumbline.report.annotations.sarif import sarif
from plumbline.report.formats import ReportFormat
from plumbline.report.tables.failures import FailureGroup, failures, message_of
from plumbline.report.text import counted, listed
from plumbline.results.records import Result
from plumbline.results.run import Run

MOST_CELLS = 5


def annotations_of(run: Run) -> list[Annotation]:
    return [_annotation(run, group) for group in failures(run)]


def run_commands(run: Run) -> str:
    return github_commands(annotations_of(run))


def run_sarif(run: Run) -> str:
    about = {"run": run.header.run_id, "command": list(run.header.command)}
    return sarif(annotations_of(run), succeeded=not run.incomplete, properties=about)


def _annotation(run: Run, group: FailureGroup) -> Annotation:
    first = group.findings[0]
    cells = [finding.cell for finding in group.findings]
    family = f" ({group.family})" if group.family else ""
    return annotate(
        first,
        message_of(first),
        rule=group.title,
        title=f"{group.subject}: {group.title}{family} in {counted(len(cells), 'cell')}",
        key="/".join(filter(None, (group.subject, group.title, group.mechanism))),
        source=_source(run, first),
        lines=[f"cells: {listed(cells, MOST_CELLS)}", first.reproduce and f"reproduce: {first.reproduce}"],
        subject=group.subject,
        cells=cells,
        reproduce=first.reproduce,
    )


def _source(run: Run, finding: Result) -> tuple[str, int] | None:
    """Return the entry of an expectation that is not met any more, otherwise where the subject's function begins."""
    source = run.header.sources.get(finding.subject)
    if finding.expected is not None and finding.is_unexpectedly_good:
        source = finding.expected.source
    return None if source is None else (source.file, source.line)


GITHUB = ReportFormat("annotations of GitHub Actions, for a step to print", run_commands)
SARIF = ReportFormat("SARIF 2.1.0, for code scanning and editors", run_sarif)
