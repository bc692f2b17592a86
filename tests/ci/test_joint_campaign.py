"""``ci/joint_campaign.py``: draws whose mistakes once had other names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.mark.nightly
@pytest.mark.parametrize("number", [6, 9])
def test_a_mistake_in_copies_is_named(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "ci")
    import joint_campaign

    result = joint_campaign.checked(joint_campaign.draw(number, 0, None))
    sys.modules.pop("joint_campaign")
    assert result.is_accused, result
    assert result.is_named, result
