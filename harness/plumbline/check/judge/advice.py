"""What to do about a mistake in a script that has no DistributedDataParallel: advice about one would mislead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.rank_layout import OBSERVER
from plumbline.core.finding import Finding

_WITHOUT_WRAPPER: Mapping[str, str] = {
    "not-synchronised": (
        "they were never all-reduced: wrap the model in DistributedDataParallel, or average the gradients over ranks "
        "between the backward pass and the step"
    ),
    "averaged-twice": "they are averaged already: remove one of the two divisions",
    "some-micro-batches-not-synchronised": "reduce the gradients of all micro-batches",
}
"""By the cause."""

AFTER_CLIPPING = "each rank clips its own gradient before the all-reduce"


def advised(finding: Finding, training: RecordedTraining) -> Finding:
    """Return a finding about gradients with advice that fits the script."""
    other = _WITHOUT_WRAPPER.get(str(finding.cause))
    wrapped = any((rank.facts.get(OBSERVER) or {}).get("wrapped") for rank in training.ranks)
    return finding if other is None or wrapped else with_hint(finding, other)


def with_hint(finding: Finding, hint: str) -> Finding:
    """Return a finding with another hint, also at the end of its message."""
    if finding.hint is None:
        return finding
    return replace(finding, message=finding.message.replace(finding.hint, hint), hint=hint)
