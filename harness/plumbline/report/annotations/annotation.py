"""A finding at a line of a file, for the systems that run CI."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from plumbline.core.finding import AnyFinding
from plumbline.report.finding_words import place_and_size


@dataclass(frozen=True)
class Annotation:
    """What is wrong, and where it is to be looked for; ``source`` is a file and a line, None where none is known.

    ``rule`` is the cause's name. ``key`` is the same in every run that has the same problem. ``details`` are further
    facts for programs, as JSON values.
    """

    rule: str
    title: str
    message: str
    key: str
    source: tuple[str, int] | None = None
    details: dict[str, Any] = field(default_factory=dict)


def annotate(
    finding: AnyFinding,
    message: str,
    *,
    rule: str,
    title: str,
    key: str,
    source: tuple[str, int] | None,
    lines: Iterable[str] = (),
    **details: Any,
) -> Annotation:
    """Return the annotation of a finding: its message, where and how large it is, and then ``lines``."""
    known = {name: getattr(finding, name) for name in ("family", "check", "step", "rank", "parameter")}
    text = "\n".join(filter(None, [message, place_and_size(finding), *lines]))
    return Annotation(rule, title, text, key, source, known | details)
