"""Steps with fewer micro-batches than others: their losses must have the same total weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from plumbline.check.judge.noted import HeadlineNote

STEPS = 4


def fit(divisor, reduction="mean"):
    """Train over windows of three micro-batches and of one; ``divisor(count)`` divides each loss."""

    def train():
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(STEPS):
            count = 1 if step % 2 else 3
            for _ in range(count):
                outputs, labels = model(torch.randn(8, 6)), torch.randint(4, (8,))
                (functional.cross_entropy(outputs, labels, reduction=reduction) / divisor(count)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def said(plumbline, train):
    findings = plumbline.check(train, ranks=1, steps=STEPS).trainings[0].findings
    notes = [one.message for one in findings if isinstance(one, HeadlineNote)]
    return notes, [one.message for one in findings if one.check == "objective" and one.message not in notes]


def test_a_short_window_that_weighs_less_is_a_note(plumbline):
    (note,), (told,) = said(plumbline, fit(lambda count: 3))
    assert note.startswith(
        "The losses of a step over 1 micro-batch have a total weight of 0.3333; those of a step over 3 have 1."
    )
    assert told == "The loss is 0.3333 to 1 × the mean over all 8 to 24 terms of cross_entropy."


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (fit(lambda count: count), "The loss is the mean over all 8 to 24 terms of cross_entropy."),
        (fit(lambda count: 1, "sum"), "The loss is the sum over all 8 to 24 terms of cross_entropy."),
    ],
)
def test_windows_of_one_objective_are_not_a_note(plumbline, train, told):
    assert said(plumbline, train) == ([], [told])
