"""FSDP2's settings, read from the states that it keeps for modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from plumbline.recording.sharding import requested_divisors

WORLD = 8


def sharded(*groups: tuple[int, float | None]) -> nn.Module:
    """Return a module with groups of parameters, each with the ranks that reduce it and the script's factor."""
    module: Any = nn.Linear(1, 1)
    held = [
        SimpleNamespace(
            fsdp_params=[1], gradient_divide_factor=factor, mesh_info=SimpleNamespace(shard_mesh_size=ranks)
        )
        for ranks, factor in groups
    ]
    module._get_fsdp_state = lambda: SimpleNamespace(_fsdp_param_groups=held)
    return module


@pytest.mark.parametrize(
    ("groups", "divisors"),
    [
        ([(WORLD, None)], {1.0}),
        ([(WORLD, 1.0)], {1 / WORLD}),
        ([(WORLD, 1.0), (1, 1.0)], {1 / WORLD}),  # sums of dense parameters, and of experts with all ranks' tokens
        ([(WORLD, None), (2, float(WORLD))], {1.0}),  # means of both
        ([(WORLD, None), (2, 1.0)], {1.0, 1 / WORLD}),
    ],
)
def test_divisors_are_multiples_of_the_ranks_of_the_largest_group(
    groups: list[tuple[int, float | None]], divisors: set[float]
) -> None:
    assert requested_divisors([sharded(*groups)]) == divisors
