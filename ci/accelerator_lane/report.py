"""The report about a run of the lane: the machine, a table of stages, and the text of failures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from accelerator_lane.stage import PASSED, Stage, StageResult

MOST_CHARACTERS = 6000
"""The length of a stage's text in the report; its log has all of it."""

_SHOWN_ALWAYS = ("claims",)


def write_report(
    name: str,
    machine: Mapping[str, str],
    notes: Sequence[str],
    stages: Sequence[Stage],
    results: Mapping[str, StageResult],
    folder: Path,
) -> str:
    """Return the report as Markdown."""
    lines = [
        f"# {name}",
        "",
        f"`ci/accelerator`, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC. {_sentence(stages, results)}",
    ]
    lines += ["", "| machine | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in machine.items())]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    lines += ["", "| stage | outcome | time | limit | counts | what it is for |", "|---|---|--:|--:|---|---|"]
    lines += [_row(stage, results.get(stage.name)) for stage in stages]
    for stage in stages:
        result = results.get(stage.name)
        if result is None or not result.command:
            continue
        lines += ["", f"## {stage.name}: {result.outcome}", "", f"    {_plain(result.command, folder)}"]
        if result.left_behind:
            lines += ["", f"Processes that were still running after its end, and were killed: {result.left_behind}."]
        if page := _run_page(folder / stage.name):
            lines += ["", _shortened(_plain(page, folder))]
        if result.outcome != PASSED or stage.name in _SHOWN_ALWAYS:
            log = _log(folder / f"{stage.name}.log")
            shown = log if stage.name in _SHOWN_ALWAYS and result.outcome == PASSED else _fenced(_failures(log))
            lines += ["", _shortened(_plain(shown, folder))]
    return "\n".join(lines) + "\n"


def _sentence(stages: Sequence[Stage], results: Mapping[str, StageResult]) -> str:
    ended = [results[stage.name].outcome for stage in stages if stage.name in results]
    seconds = sum(result.seconds for result in results.values())
    counted = ", ".join(f"{ended.count(outcome)} {outcome}" for outcome in dict.fromkeys(ended))
    return f"{len(stages)} stages: {counted or 'none was run'}; {seconds / 60:.1f} minutes."


def _row(stage: Stage, result: StageResult | None) -> str:
    if result is None:
        return f"| {stage.name} | – | – | {stage.limit_s:.0f} s | – | {stage.why} |"
    counts = ", ".join(f"{number} {what}" for what, number in result.counts.items())
    code = "" if result.exit_code in (None, 0) else f" ({result.exit_code})"
    taken = f"{result.seconds:.0f} s"
    return (
        f"| {stage.name} | {result.outcome}{code} | {taken} | {stage.limit_s:.0f} s | {counts or '–'} | {stage.why} |"
    )


def _run_page(folder: Path) -> str:
    """Return the summary page of the newest run below ``folder``, with its headings two levels deeper."""
    pages = [path for path in folder.glob("*/report.md") if not path.parent.is_symlink()]
    if not pages:
        return ""
    newest = max(pages, key=lambda path: path.stat().st_mtime)
    return re.sub(r"(?m)^(#+) ", r"##\1 ", newest.read_text(encoding="utf-8", errors="replace")).strip()


def _log(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith("$ ")).strip()


def _failures(log: str) -> str:
    """Return pytest's failure report and what follows it, or else the end of the log."""
    begun = re.search(r"(?m)^=+ (?:FAILURES|ERRORS) =+$", log)
    return log[begun.start() :] if begun else "\n".join(log.splitlines()[-60:])


def _fenced(text: str) -> str:
    return "```text\n" + text.replace("```", "'''") + "\n```" if text else ""


def _shortened(text: str) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


def _plain(text: str, folder: Path) -> str:
    """Return ``text`` without this machine's paths."""
    root = folder.parent.parent if folder.parent.name == "reports" else folder.parent
    for path in (str(root.resolve()), str(root)):
        text = text.replace(f"{path}/", "")
    return text.replace(str(Path.home()), "~")


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
