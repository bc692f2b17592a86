"""A subject's declaration of its way of training survives a round trip through plain values."""

from __future__ import annotations

from itertools import product

import pytest

from plumbline.core.training_behavior import CHOICES, ORDINARY, TrainingBehavior


def test_every_behavior_comes_back_from_what_it_declares():
    for values in product(*CHOICES.values(), (None, 1, 3), (1, 2), (None, 4)):
        said = dict(zip((*CHOICES, "max_nodes", "stages_per_rank", "max_stages"), values, strict=True))
        if said["data"] == "iterations" and said["shuffle"] != "job":
            continue
        behavior = TrainingBehavior(**said)
        assert TrainingBehavior.of(behavior.declared) == behavior


def test_what_is_ordinary_declares_nothing():
    assert ORDINARY.declared == {}
    assert TrainingBehavior.of({}) == ORDINARY


def test_what_another_version_knows_is_not_ignored():
    with pytest.raises(ValueError, match="unknown declaration 'communication'"):
        TrainingBehavior.of({"communication": "late"})


@pytest.mark.parametrize("asked", [True, False])
def test_the_order_is_the_job_s_unless_it_is_declared(asked):
    assert ORDINARY.shuffles(asked) is asked
    assert TrainingBehavior(shuffle="always").shuffles(asked)
    assert not TrainingBehavior(shuffle="never").shuffles(asked)


def test_what_it_divides_is_written_as_text():
    behavior = TrainingBehavior(divides=("experts", "heads"))
    assert behavior.declared == {"divides": "experts heads"}
    assert TrainingBehavior.of(behavior.declared) == behavior
