"""What a subject says of itself: ``@subject(...)`` over its ``train(job)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.backend import BACKENDS
from harness.core.errors import SubjectError
from harness.core.precision import PRECISIONS

CAPABILITIES = frozenset(
    {
        "accumulation",
        "clipping",
        "scheduler",
        "several-optimizers",
        "validation",
        "checkpoint",
        "metrics",
        "unused-parameters",
        "frozen-parameters",
        "sparse-gradients",
        "nested-outputs",
    }
)

Train = Callable[[Any], None]


@dataclass(frozen=True)
class Subject:
    """A trainer under test: its function and what it says it supports."""

    name: str
    train: Train
    backends: tuple[str, ...]
    precisions: tuple[str, ...]
    capabilities: frozenset[str]

    def declaration(self) -> dict[str, Any]:
        """Return what the parent needs to plan, as plain values."""
        return {
            "name": self.name,
            "backends": list(self.backends),
            "precisions": list(self.precisions),
            "capabilities": sorted(self.capabilities),
        }


def subject(
    *,
    name: str,
    backends: Sequence[str],
    precisions: Sequence[str] = ("32",),
    capabilities: Sequence[str] = (),
) -> Callable[[Train], Train]:
    """Declare a function ``train(job)`` as a trainer under test.

    Args:
        name: what reports call it.
        backends: which of ``none``, ``dp``, ``ddp``, ``ddp2`` it can do.
        precisions: which of ``64``, ``32``, ``16``, ``bf16`` it can do.
        capabilities: what it does beyond forward, backward, step, epochs and shuffling.

    Raises:
        SubjectError: a name is not one of those, or cannot stand in a test id and a file name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
        raise SubjectError(f"subject name {name!r}: use letters, digits and . _ + - so that it can name files")
    for what, given, known in (
        ("backend", backends, BACKENDS),
        ("precision", precisions, PRECISIONS),
        ("capability", capabilities, CAPABILITIES),
    ):
        for value in given:
            if value not in known:
                raise SubjectError(f"subject {name!r}: there is no {what} {value!r}; there are {', '.join(known)}")

    def declare(train: Train) -> Train:
        declared = Subject(name, train, tuple(backends), tuple(precisions), frozenset(capabilities))
        train.__plumbline_subject__ = declared  # type: ignore[attr-defined]
        return train

    return declare
