"""A step that the loss scaler skipped must leave the weights as they were, whatever they were."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from harness.core.outcome import Outcome
from harness.evidence.trace import MicroBatch, RankTrace, Step, Trace
from harness.judge.checks.skipped_steps import skipped_steps


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0], [1.0, 3.0], "moved-when-skipped"),
        ([1.0, torch.nan], [1.0, torch.nan], None),
        ([1.0, torch.nan], [2.0, torch.nan], "moved-when-skipped"),
    ],
)
def test_weights_that_are_not_numbers_stand_still_too(before, after, cause):
    weights = ({"w": torch.tensor(values)} for values in (before, after))
    overflow = {"w": torch.full((2,), torch.inf)}
    step = Step((MicroBatch(((0,),), (0,)),), next(weights), overflow, next(weights), (0.1,), True, 65536.0)
    found = skipped_steps(SimpleNamespace(trace=Trace((RankTrace(0, 1, (step,)),))))
    assert (found.outcome, found.cause) == (Outcome.FAILED if cause else Outcome.PASSED, cause)
