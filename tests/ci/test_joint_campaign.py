"""``ci/joint_campaign.py``: draws whose mistakes were once named wrongly, or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("seed", "number"), [(0, 6), (0, 7), (0, 9), (0, 13), (0, 41), (0, 50), (0, 61), (0, 77), (1, 44), (401, 38)]
)
def test_a_mistake_is_caught_and_named(seed: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "ci")
    import joint_campaign

    result = joint_campaign.checked(joint_campaign.draw(number, seed, None))
    sys.modules.pop("joint_campaign")
    assert result.is_accused, result
    assert result.is_named, result
