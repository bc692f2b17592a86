"""Removes backward passes before the first step whose gradients the script discards, as in a trial or warm-up."""

from __future__ import annotations

from dataclasses import replace

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.judged_gradients import received_gradients
from plumbline.judge.mistakes.case import RIGHT


def without_discarded_passes(training: RecordedTraining) -> RecordedTraining:
    """Return a training without the backward passes that the script discards before an optimizer's first step.

    ``zero_grad()`` in the wrong place discards gradients at every step. Passes therefore count as discarded on purpose
    only if the first step has more of them than any later one, and its gradient is right without them and wrong with
    them.
    """
    for optimizer in sorted({step.optimizer for rank in training.ranks for step in rank.steps}):
        fewer = _with_fewer_passes(training, optimizer)
        if fewer is not None and not _begins_right(training, optimizer) and _begins_right(fewer, optimizer):
            training = fewer
    return training


def _with_fewer_passes(training: RecordedTraining, optimizer: int) -> RecordedTraining | None:
    """Leave out the first step's earliest passes in excess of any later step; None if there are none."""
    ranks = []
    for rank in training.ranks:
        own = [step for step in rank.steps if step.optimizer == optimizer]
        most = max((len(step.passes) for step in own[1:]), default=0)
        if not most or (first := own[0]).number or len(first.passes) <= most:
            return None
        fewer = replace(first, passes=first.passes[-most:])
        ranks.append(replace(rank, steps=tuple(fewer if step is first else step for step in rank.steps)))
    return replace(training, ranks=tuple(ranks))


def _begins_right(training: RecordedTraining, optimizer: int) -> bool:
    cases = [one for one in received_gradients(training) if one.step.optimizer == optimizer and not one.step.number]
    return bool(cases) and all(bool(one.compared.any()) and one.fit(RIGHT).holds for one in cases)
