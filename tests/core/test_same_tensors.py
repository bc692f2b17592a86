"""When tensors of two traces count as equal."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.evidence.trace import same

VALUES = st.lists(
    st.sampled_from([0.0, 1.0, math.inf, -math.inf, math.nan, 3.4028234663852886e38]), min_size=2, max_size=2
)


@given(VALUES, VALUES)
def test_nan_equals_nan_alone(left: list[float], right: list[float]) -> None:
    are_same = all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(left, right, strict=True))
    assert same({"weight": torch.tensor(left)}, {"weight": torch.tensor(right)}) is are_same


def test_names_and_shapes_count() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert not same({"weight": one}, {"bias": one})
    assert not same({"weight": one}, {"weight": two})
    assert not same({"weight": torch.full((1,), math.nan)}, {"weight": torch.full((2,), math.nan)})
