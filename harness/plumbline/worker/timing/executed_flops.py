"""How many floating-point operations a rank executed in a step, by torch's counter; what is done twice counts twice.

A multiplication with its addition is two; matrix products, convolutions and attention count, as in the usual formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


class _NoModules:
    """In place of the counter's tracking of modules: its hooks on gradients break a backward in two parts.

    That is how pipelines put off the gradients of weights (torch 2.13).
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class ExecutedFlops:
    """Counts between ``start`` and ``stop``, which lie around one step; ``total`` is None where it could not be seen.

    A process that computes on several devices has a thread for each, which the counter does not follow.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.total: int | None = None
        self._counter: Any = None
        if len(devices) == 1:
            self._counter = FlopCounterMode(display=False)
            self._counter.mod_tracker = _NoModules()

    def start(self) -> None:
        if self._counter is not None:
            self._counter.__enter__()

    def stop(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.total = int(self._counter.get_total_flops())
