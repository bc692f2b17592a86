"""Failures whose message ends with what to look at, after the place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plumbline.core.finding import Finding
from plumbline.judge.findings import failed


def accuse(check: str, observed: str, hint: str, **place_and_cause: Any) -> Finding:
    """Return a failure: what was observed, where, and ``hint``, what to look at; the rest is as for ``failed``."""
    finding = failed(check, observed, **place_and_cause)
    return replace(finding, message=f"{finding.message}: {hint}")
