"""Annotations as SARIF 2.1.0 (OASIS), which code scanning of GitHub, GitLab, Azure and most editors read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from plumbline.machine.software import plumbline_version
from plumbline.report.annotations.annotation import Annotation
from plumbline.report.text import printable_lines

SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif(annotations: Sequence[Annotation], *, succeeded: bool, properties: dict[str, Any]) -> str:
    """Return a log with one run. ``succeeded``: everything was judged; ``properties`` say what it was about."""
    rules = list(dict.fromkeys(one.rule for one in annotations))
    driver = {
        "name": "Plumbline",
        "version": plumbline_version(),
        "rules": [{"id": rule, "shortDescription": {"text": rule.replace("-", " ")}} for rule in rules],
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
