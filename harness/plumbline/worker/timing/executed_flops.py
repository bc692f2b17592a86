"""The number of floating-point operations that a rank executed in a step, by torch's counter.

It counts matrix products, convolutions and attention; a multiplication with its addition is two operations. Repeated
work, as with activation checkpointing, counts each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


class _NoModules:
    """Replaces the counter's tracking of modules, whose hooks break a backward in two parts.

    Pipelines use such a backward to defer the gradients of weights (torch 2.13).
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class ExecutedFlops:
    """Counts between ``start`` and ``stop``, which surround one step.

    ``total`` stays None for a process with several devices, whose threads the counter does not follow.
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
