"""A truth may know gradients only by scalar products with directions: the same check judges and explains them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.truth import RIGHT, Combination, GradientCase, GradientEvidence, Truth

OF_RANKS = ((1.0, -2.0, 0.5), (3.0, 1.0, 4.0), (-1.0, 2.5, 1.0))
"""What each of three ranks adds to the mean's scalar products with three directions, times three."""

MEAN = tuple(sum(products) / 3 for products in zip(*OF_RANKS, strict=True))
MEAN_OF_TWO = [(one + other) / 2 for one, other in zip(OF_RANKS[0], OF_RANKS[1], strict=True)]


@dataclass(frozen=True, eq=False)
class Projected(GradientCase):
    """One rank's gradient at one step, with scalar products ``received``."""

    rank: int
    received: Sequence[float]

    index = 0
    world = len(OF_RANKS)
    micro_batches = accumulate = 1
    scales = (None,) * len(OF_RANKS)
    has_shares = (True,) * len(OF_RANKS)
    has_earlier_step = False
    zeros = (False,)
    factor = 1.0
    limit = 1e-9

    def misfits(self, prediction: object) -> Iterator[float]:
        if isinstance(prediction, Combination):
            weights = [prediction.weight(rank, 0, 1) / self.world for rank in range(self.world)]
            predicted = [
                sum(weight * product for weight, product in zip(weights, products, strict=True))
                for products in zip(*OF_RANKS, strict=True)
            ]
            yield max(abs(one - other) for one, other in zip(predicted, self.received, strict=True))


class Directions(Truth[Projected]):
    """Knows each rank's contribution to a few scalar products."""

    def __init__(self, received: Sequence[Sequence[float]]) -> None:
        self._cases = [Projected(rank, products) for rank, products in enumerate(received)]

    @property
    def cases(self) -> Sequence[Projected]:
        return self._cases

    def compare(self) -> Finding:
        outcome = Outcome.PASSED if all(case.is_right for case in self.cases) else Outcome.FAILED
        return Finding("gradients", outcome, "gradients along three directions")

    def evidence(self, wrong: Sequence[Projected]) -> GradientEvidence[Projected]:
        return GradientEvidence(wrong)


@pytest.mark.parametrize(
    ("received", "cause"),
    [
        ([MEAN] * 3, None),
        (OF_RANKS, "not-synchronised"),
        ([[3 * product for product in MEAN]] * 3, "summed-over-ranks"),
        ([MEAN, [product / 3 for product in MEAN], MEAN], "averaged-twice"),
        ([OF_RANKS[1], OF_RANKS[2], OF_RANKS[0]], "another-ranks-gradient"),
        ([OF_RANKS[0]] * 3, "another-ranks-gradient"),
        ([MEAN_OF_TWO, MEAN_OF_TWO, OF_RANKS[2]], "averaged-over-some-ranks"),
        ([(7.0, 7.0, 7.0)] * 3, "unexplained"),
    ],
)
def test_mistakes_are_named_by_what_they_make_of_projections(received, cause):
    finding = Directions(received).judge()
    assert finding.cause == cause
    assert finding.outcome is (Outcome.PASSED if cause is None else Outcome.FAILED)


def test_a_right_gradient_is_the_mean_with_all_weights_one():
    assert [*Projected(0, MEAN).misfits(RIGHT)] == [pytest.approx(0.0, abs=1e-12)]
