"""What to do about a mistake in a script that has no DistributedDataParallel: advice about one would mislead."""

from __future__ import annotations

from collections.abc import Mapping

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.rank_layout import OBSERVER
from plumbline.core.finding import Finding
from plumbline.judge.findings import with_hint

_WITHOUT_WRAPPER: Mapping[str, str] = {
    "not-synchronised": (
        "they were never all-reduced: wrap the model in DistributedDataParallel, or average the gradients over ranks "
        "between the backward pass and the step"
    ),
    "averaged-twice": "they are averaged already: remove one of the two divisions",
    "some-micro-batches-not-synchronised": "reduce the gradients of all micro-batches",
}
"""By the cause."""


def advised(finding: Finding, training: RecordedTraining) -> Finding:
    """Return a finding about gradients with advice that fits the script."""
    other = _WITHOUT_WRAPPER.get(str(finding.cause))
    wrapped = any((rank.facts.get(OBSERVER) or {}).get("wrapped") for rank in training.ranks)
    return finding if other is None or wrapped else with_hint(finding, other)
