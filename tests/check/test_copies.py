"""Copies of one parameter may differ by rounding, but not by each rank's samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plumbline.check.evidence.training import BackwardPass, Parameter, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.unreduced import judge_replicated_gradients
from plumbline.check.rank.joint.copies_and_parts import Beginnings, grouped

SIXTEEN, THIRTY_TWO = 2.0**-8, 2.0**-24
APART = [(SIXTEEN, 0.02, True), (SIXTEEN, 0.2, False), (THIRTY_TWO, 2e-6, True), (THIRTY_TWO, 2e-5, False)]


@pytest.mark.parametrize(("unit", "apart", "are_one"), APART)
def test_copies_have_gradients_that_differ_by_rounding_alone(unit: float, apart: float, are_one: bool) -> None:
    held: list[list[dict[str, Any]]] = [
        [
            {
                "name": "w", "shape": [2], "ranks": [rank], "stage": "", "tied": False, "size": 1.0,
                "constant": False, "weights": [1.0, 2.0], "gradient": [1.0, apart * rank],
            }
        ]
        for rank in range(2)
    ]  # fmt: skip
    (first, *others) = grouped(held, unit, Beginnings())
    assert len(first.instances) == (2 if are_one else 1)
    assert len(others) == (0 if are_one else 1)


@pytest.mark.parametrize(("unit", "apart", "are_one"), APART)
def test_replicated_gradients_that_differ_by_more_than_rounding_are_named(
    unit: float, apart: float, are_one: bool
) -> None:
    def step(rank: int) -> RecordedStep:
        weights = {
            "wrapped": [False], "unreduced": [""], "replicated": [True], "began": ["same"], "before": ["same"],
            "gradients": [f"of {rank}"], "after": [f"of {rank}"], "projections": [[1.0, float(rank)]],
        }  # fmt: skip
        gradient = torch.tensor([1.0, apart * rank], dtype=torch.float64)
        autocast = {"autocast": {"cpu bfloat16": 1}} if unit == SIXTEEN else {}
        facts = {"weights": weights, "precision": autocast}
        return RecordedStep(
            0, 0, (Parameter("w", (2,), "float32"),), gradient, (BackwardPass(0, gradient),), facts=facts
        )

    training = RecordedTraining(tuple(RecordedRank(rank, 2, (step(rank),)) for rank in range(2)))
    found = judge_replicated_gradients(training)
    assert (found is None) == are_one
