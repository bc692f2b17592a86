"""Finds parameters that are one rank's part of a model, such as experts and hand-written tensor-parallel shards."""

from __future__ import annotations

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.clipped_masters import OBSERVER as MASTERS
from plumbline.check.judge.rank_weights import common_steps, weights_at

OBSERVER = "joint"


def forward_communicates(training: RecordedTraining) -> bool:
    """Return whether the forward of any module communicates with other ranks."""
    return any((rank.facts.get(OBSERVER) or {}).get("communicates") for rank in training.ranks)


def model_parts(training: RecordedTraining) -> set[tuple[int, str]]:
    """Return the optimizer and the name of each parameter of which every rank holds a different part.

    Its initial weights differ between ranks, ranks never step with the same gradient for it, and the model's forward
    communicates. If no forward communicates, the script forgot to synchronise such parameters.
    """
    if not forward_communicates(training):
        return set()
    apart = {
        (step.optimizer, name)
        for rank in training.ranks
        for step in rank.steps
        for name in (step.facts.get(MASTERS) or {}).get("apart", ())
    }
    shared: set[tuple[int, str]] = set()
    for place, steps in common_steps(training):
        optimizer = next(iter(steps.values())).optimizer
        for one in weights_at(place, steps):
            key = (optimizer, one.parameter.name)
            if one.differ("began") and not one.is_wrapped:
                apart.add(key)
            if one.share_gradient:
                shared.add(key)
    return apart - shared
