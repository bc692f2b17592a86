"""The body as a test with Plumbline's marker."""

from __future__ import annotations

import pytest
from ddp import train_and_compare


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=pytest.mark.ranks(ranks)) for ranks in (2, 4, 8)])
def test_marked(ranks: int, rank: int, world_size: int) -> None:
    """Run the body on ``ranks`` ranks."""
    train_and_compare(rank, world_size)
