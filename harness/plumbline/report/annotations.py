"""Findings with file and line for CI systems: GitHub Actions commands, SARIF, and GitLab's code quality report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from plumbline.core.finding import Finding
from plumbline.core.titles import title_of
from plumbline.machine.software import plumbline_version
from plumbline.report.text import place_and_size, printable_lines

if TYPE_CHECKING:
    from plumbline.results.records import FindingRecord  # it needs pydantic


@dataclass(frozen=True)
class Annotation:
    """One problem. ``rule`` is the name of its cause; ``source`` is a file and a line, if known.

    ``key`` is the same in every run with the same problem. ``details`` are further facts, as JSON values.
    """

    rule: str
    title: str
    message: str
    key: str
    source: tuple[str, int] | None = None
    details: dict[str, Any] = field(default_factory=dict)


def annotate(
    finding: Finding | FindingRecord,
    message: str,
    *,
    rule: str,
    title: str,
    key: str,
    source: tuple[str, int] | None,
    lines: Iterable[str] = (),
    **details: Any,
) -> Annotation:
    known = {name: getattr(finding, name) for name in ("family", "check", "step", "rank", "parameter")}
    text = "\n".join(filter(None, [message, place_and_size(finding), *lines]))
    return Annotation(rule, title, text, key, source and _in_repository(*source), known | details)


def _in_repository(file: str, line: int) -> tuple[str, int]:
    """Return a place relative to the repository, as CI systems expect; ``file`` is relative to the current folder."""
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    place = here / file
    return (place.relative_to(root).as_posix() if place.is_file() and place.is_relative_to(root) else file), line


_IN_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_IN_PROPERTY = {**_IN_MESSAGE, **str.maketrans({":": "%3A", ",": "%2C"})}


def github_commands(annotations: Iterable[Annotation]) -> str:
    """Return one command line per annotation. Outside text is escaped: it cannot begin a line or end a property."""
    return "".join(f"{_command(one)}\n" for one in annotations)


def _command(one: Annotation) -> str:
    place = {} if one.source is None else {"file": one.source[0], "line": str(one.source[1])}
    properties = {**place, "title": one.title}
    written = ",".join(f"{name}={printable_lines(value).translate(_IN_PROPERTY)}" for name, value in properties.items())
    return f"::error {written}::{printable_lines(one.message).translate(_IN_MESSAGE)}"


def code_quality(annotations: Iterable[Annotation]) -> str:
    """Return GitLab's code quality report, without annotations that have no place in a file of the repository."""
    problems = [
        {
            "check_name": one.rule,
            "description": printable_lines(f"{one.title}: {one.message}"),
            "fingerprint": hashlib.sha256(f"{one.key} {file}".encode()).hexdigest(),
            "severity": "critical",
            "location": {"path": file, "lines": {"begin": line}},
        }
        for one in annotations
        for file, line in ([one.source] if one.source else [])
        if not Path(file).is_absolute()
    ]
    return json.dumps(problems, indent=2) + "\n"


SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif(annotations: Sequence[Annotation], *, succeeded: bool, properties: dict[str, Any]) -> str:
    """Return a SARIF log with one run. ``succeeded``: everything was judged; ``properties`` describe the run."""
    rules = list(dict.fromkeys(one.rule for one in annotations))
    driver = {
        "name": "Plumbline",
        "version": plumbline_version(),
        "rules": [{"id": rule, "shortDescription": {"text": title_of(rule)}} for rule in rules],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": succeeded}],
        "results": [_result(one, rules.index(one.rule)) for one in annotations],
        "properties": properties,
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _result(one: Annotation, rule: int) -> dict[str, Any]:
    result = {
        "ruleId": one.rule,
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": printable_lines(f"{one.title}\n{one.message}")},
        "partialFingerprints": {"problem/v1": one.key},
        "properties": {name: value for name, value in one.details.items() if value is not None},
    }
    return result if one.source is None else {**result, "locations": [_location(*one.source)]}


def _location(name: str, line: int) -> dict[str, Any]:
    path = Path(name)
    file = {"uri": path.as_uri()} if path.is_absolute() else {"uri": quote(name), "uriBaseId": "%SRCROOT%"}
    return {"physicalLocation": {"artifactLocation": file, "region": {"startLine": line}}}
