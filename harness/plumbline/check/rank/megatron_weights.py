"""Finds the pieces of a model's parameters that Megatron's optimizers hold, from their own attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from plumbline.check.rank.stepping_object import stepping_object
from plumbline.recording.master_weights import Piece, pieces_of


def pieces_of_megatron(model: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Piece]:
    """Return the pieces that parameters name in ``main_param``, and the pieces that can be found for other masters.

    With the distributed optimizer, only the optimizer knows where a piece begins. Without any ``main_param``, nothing
    is returned.
    """
    left = {id(one): one for one in masters}
    pieces: list[Piece] = []
    for one in model:
        noted: Any = one
        master = getattr(noted, "main_param", None)
        if master is not None and id(master) in left:
            start = _start_of(one) if getattr(noted, "main_param_sharded", False) else 0
            if start is None:
                return []
            pieces.append(Piece(one, start, master.numel(), left.pop(id(master)), 0))
    if not pieces or not left:
        return pieces
    noted_for = {id(one.parameter) for one in pieces}
    others = pieces_of([one for one in model if id(one) not in noted_for], list(left.values()))
    return [*pieces, *others] if others else []


def _start_of(parameter: Tensor) -> int | None:
    optimizer = stepping_object(lambda one: hasattr(type(one), "_get_model_param_range_map"))
    return None if optimizer is None else int(optimizer._get_model_param_range_map(parameter)["param"].start)
