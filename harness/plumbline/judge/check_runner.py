"""Runs the checks that are registered for a kind of evidence."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence.recording import Recording
from plumbline.judge.causes.registry import explain
from plumbline.judge.causes.step_count import VacuousCase
from plumbline.judge.checks import Check, checks_of
from plumbline.judge.findings import Vacuous
from plumbline.judge.trace_analysis import TraceAnalysis


def run_checks(evidence: Recording) -> list[Finding]:
    """Return what every check finds, in the order of the registry."""
    checks = checks_of(type(evidence))
    return [finding for name, check in checks.items() for finding in run_check(name, check, evidence)]


def run_check(name: str, check: Check, evidence: Recording) -> Iterator[Finding]:
    """Yield what one check finds. A check that raises has no verdict, and does not hide what it found before."""
    try:
        found = check(evidence)
        if found is not None:
            yield from [found] if isinstance(found, Finding) else found
    except Vacuous as reason:
        finding = Finding(name, Outcome.ERRORED, f"vacuous: {reason}")
        yield explain(finding, VacuousCase(evidence)) if isinstance(evidence, TraceAnalysis) else finding
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raised = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
        yield Finding(name, Outcome.ERRORED, f"it could not be judged: {raised}")
