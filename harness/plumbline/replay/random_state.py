"""The states of the random number generators that a forward may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The states of torch's, Python's and, where it was imported, numpy's generators, and of others by themselves."""

    cpu: Tensor
    cuda: tuple[tuple[int, Tensor], ...]
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    others: tuple[tuple[torch.Generator, Tensor], ...] = ()

    @classmethod
    def now(cls, devices: Iterable[torch.device], others: Iterable[torch.Generator] = ()) -> RandomState:
        """Return the present states: of the cpu, of each CUDA device among ``devices``, and of ``others``."""
        indices = sorted({_index(device) for device in devices if device.type == "cuda"})
        numpy = _numpy_random()
        return cls(
            torch.random.get_rng_state(),
            tuple((index, torch.cuda.get_rng_state(index)) for index in indices),
            random.getstate(),
            None if numpy is None else numpy.get_state(),
            tuple((one, one.get_state()) for one in others),
        )

    def set(self) -> None:
        """Set the generators to these states."""
        torch.random.set_rng_state(self.cpu)
        for index, state in self.cuda:
            torch.cuda.set_rng_state(state, index)
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy_random().set_state(self.numpy)
        for one, state in self.others:
            one.set_state(state)


@contextmanager
def drawn_from(state: RandomState) -> Iterator[None]:
    """Draw from these states inside the block; after it the generators are as they were."""
    devices = (torch.device("cuda", index) for index, _ in state.cuda)
    before = RandomState.now(devices, (one for one, _ in state.others))
    state.set()
    try:
        yield
    finally:
        before.set()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _numpy_random() -> Any:
    """Return ``numpy.random`` where the script has imported it, else None."""
    return sys.modules.get("numpy.random")
