"""The search for wrong gradients in few directions, compared with a derivative of known gradients."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plumbline.check.rank.joint.comparison import ROUNDS, GradientSearch
from plumbline.check.rank.joint.copies_and_parts import Beginnings, Group, Kind
from plumbline.check.rank.joint.derivative import Difference, Reading
from plumbline.replay.derivatives import InPlace

LIMIT = 16.0


class Derivative:
    """Directions through parameters on one rank: each adds its gradient, its error and what is left, × a random number.

    ``noise`` is 1; an error of rounding is added to each direction.
    """

    limit = LIMIT
    losses = 1
    unit = 2.0**-8
    is_coarse = True
    divided_by = 1.0
    by_hand = 1.0
    factor = None
    adds_gradients = unrepeatable = ()
    has_one_loss = has_same_loss = is_first = are_copies = receives_constants = is_edited = False
    has_parts_of_losses, ranks_of_a_loss, may_pass_on = False, 1, False
    changed: tuple[str, ...] = ()
    not_compared: tuple[int, ...] = ()
    in_place = (InPlace.DERIVED,)
    communicate = (False,)

    def __init__(self, seed: int, gradients: list[float], errors: list[float], left: float = 0.0) -> None:
        self._seed, self._gradients, self._errors, self._left = seed, gradients, errors, left
        self.groups = [Group(Kind(f"w{index}", (4,), 1), (((0, index),),), 1.0) for index in range(len(gradients))]
        fact = {"copies": 1, "ranks": [0], "tied": False, "stage": "", "constant": False}
        self.every = [[{**fact, "name": one.name, "recorded": [one.name]} for one in self.groups]]
        self.squares: dict[Any, float] = {}
        self.directions = 0

    def read_as(self, reading: Reading) -> None:
        assert not reading.is_sum  # a single rank has nothing to sum

    def not_derivatives(self) -> list[str]:
        return []

    def difference(self, places: list[int], seed: str, *_: Any, **__: Any) -> Difference:
        self.directions += 1
        random = Random(f"{self._seed} {seed} {places}")
        along = {place: random.gauss(0.0, 1.0) for place in places}
        right = sum(self._gradients[place] * along[place] for place in places)
        left = {place: random.gauss(0.0, self._left) if self._left else 0.0 for place in places}
        received = {
            place: (self._gradients[place] + self._errors[place]) * along[place] + left[place] for place in places
        }
        received[places[0]] += random.gauss(0.0, 0.5)
        typical = {place: abs(self._gradients[place]) for place in places}
        return Difference([[right]], right, 1.0, LIMIT, received, left, typical)


def found_in(derivative: Derivative) -> dict[str, Any]:
    places, beginnings = list(range(len(derivative.groups))), Beginnings()
    for group in derivative.groups:
        beginnings.note(group.kind.family, alike=False)
    return GradientSearch(derivative, beginnings, None, places).facts()  # type: ignore[arg-type]


@given(seed=st.integers(0, 10**6), wrong=st.integers(0, 15))
def test_a_wrong_gradient_is_found_and_no_other(seed: int, wrong: int) -> None:
    errors = [0.0] * 16
    errors[wrong] = 1e9
    found = found_in(Derivative(seed, [1e3] * 16, errors))
    assert [one["name"] for one in found["wrong"]] == [f"w{wrong}"]


@given(seed=st.integers(0, 10**6), gradient=st.sampled_from([0.0, 1.0, 1e3]))
def test_right_gradients_are_right_in_any_direction(seed: int, gradient: float) -> None:
    found = found_in(Derivative(seed, [gradient] * 16, [0.0] * 16))
    assert (found["wrong"], found["unconfirmed"]) == ([], [])
    assert bool(found["judged"]) == (gradient >= 1e3)


@given(seed=st.integers(0, 10**6))
def test_errors_that_only_many_parameters_show_together_are_not_dropped(seed: int) -> None:
    """In directions through all 64 parameters, they are about 64 × noise; through one, 8 ×."""
    derivative = Derivative(seed, [50.0] * 64, [8.0] * 64)
    every = list(range(64))
    assume(derivative.difference(every, "0").error(every) > LIMIT)
    found = found_in(derivative)
    assert found["wrong"] or found["unconfirmed"]


@given(seed=st.integers(0, 10**6))
def test_what_the_step_before_left_is_looked_at_in_many_directions(seed: int) -> None:
    derivative = Derivative(seed, [100.0] * 4, [0.0] * 4, left=4.0)
    found = found_in(derivative)
    suspicious = any(abs(one["received"] - one["shares"][0][0]) > LIMIT / 4 for one in found["right"])
    assert not suspicious or found["wrong"] or len(found["right"]) + len(found["unconfirmed"]) >= ROUNDS


@pytest.mark.parametrize("seed", range(3))
def test_right_gradients_take_few_directions(seed: int) -> None:
    derivative = Derivative(seed, [1e3] * 16, [0.0] * 16)
    found_in(derivative)
    assert derivative.directions <= 8
