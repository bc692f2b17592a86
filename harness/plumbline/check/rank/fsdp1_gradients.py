"""Gathers whole gradients of parameters in FSDP1's flat parameters, in an order that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.recording.flat_sharding import FlatUnit, flat_units, part_of
from plumbline.recording.parameter_names import ParameterNames
from plumbline.recording.parameters import parameters_of

Whole = dict[int, "Tensor | None"]
"""Whole gradients by the ids of parameters; None for a parameter without a gradient on any rank."""


class FlatGradients:
    """Determines which flat gradients are gathered before an optimizer's step.

    Ranks agree on this at the optimizer's first step, because a rank's optimizer can lack parameters.
    """

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self._agreed: dict[int, tuple[int, list[int]]] = {}

    def units(self, optimizer: Optimizer) -> list[FlatUnit]:
        """Return the units in which some rank's optimizer has a parameter. All ranks have to call this."""
        every = [unit for root in self._names.roots for unit in flat_units(root)]
        every = list({id(unit.flat): unit for unit in every}.values())
        if not every:
            return []
        own = {id(part.unit.flat) for one in parameters_of(optimizer) if (part := part_of(one)) is not None}
        places = [index for index, unit in enumerate(every) if id(unit.flat) in own]
        known, agreed = self._agreed.get(id(optimizer), (0, []))
        if known != len(every) or not set(places) <= set(agreed):
            agreed = sorted(set(places) | _of_others(every, places))
            self._agreed[id(optimizer)] = len(every), agreed
        return [every[place] for place in agreed]


def gathered(units: Iterable[FlatUnit], of: Callable[[Tensor], Tensor | None]) -> Whole:
    """Return whole tensors. ``of`` returns what this rank has of one; see ``FlatUnit.gathered``."""
    found: Whole = {}
    for unit in units:
        found.update(zip(map(id, unit.parameters), unit.gathered(of), strict=True))
    return found


def _of_others(every: Sequence[FlatUnit], places: Sequence[int]) -> set[int]:
    """Return the places of the units in the optimizers of all ranks that share a sharded unit with this rank."""
    groups: dict[int, Any] = {id(unit.group): unit.group for unit in every if unit.is_sharded}
    found: set[int] = set()
    for group in groups.values():
        answers: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(answers, places, group=group)
        found.update(place for own in answers for place in own if every[place].group is group)
    return found
