"""Whether a loss that the model computes beside its output reaches a backward pass."""

from __future__ import annotations

from collections.abc import Iterator

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.noted import failed_observers, headline_note, listed
from plumbline.core.finding import Finding

OBSERVER = "unused-losses"
CHECK = "objective"


def judge_unused_losses(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a note on the losses that no recorded backward pass of any rank uses."""
    yield from failed_observers(training, OBSERVER, CHECK)
    facts = [rank.facts.get(OBSERVER) or {} for rank in training.ranks]
    used = {name for one in facts for name in one.get("used", ())}
    unused = sorted({name for one in facts for name in one.get("unused", ())} - used)
    if unused:
        several = len(unused) > 1
        yield headline_note(
            CHECK,
            f"The model computes {listed(unused)} with gradients, but no recorded backward pass uses "
            f"{'them' if several else 'it'}. Add {'them' if several else 'it'} to the loss, or detach "
            f"{'them' if several else 'it'} if only the value is needed.",
        )
