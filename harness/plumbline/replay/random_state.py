"""The states of the random number generators that a forward may draw from, and of autocast; numbers for checks."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from plumbline.devices.calls import index_of, random_state, set_random_state


@dataclass(frozen=True)
class RandomState:
    """The states of the generators of torch, Python and, if imported, numpy, and of separate generators (``others``).

    ``tracked`` has the states in Megatron's trackers of random states, by name.
    """

    cpu: Tensor
    devices: tuple[tuple[torch.device, Tensor], ...]
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    others: tuple[tuple[torch.Generator, Tensor], ...] = ()
    tracked: tuple[tuple[Any, dict[str, Any]], ...] = ()

    @classmethod
    def now(cls, devices: Iterable[torch.device], others: Iterable[torch.Generator] = ()) -> RandomState:
        """Return the current states: of the CPU, of each of ``devices`` that has a generator, and of ``others``."""
        kinds = ((one.type, index_of(one)) for one in devices if one.type != "cpu")
        states = ((one, random_state(one)) for one in (torch.device(*place) for place in sorted(set(kinds))))
        numpy = _numpy_random()
        trackers = _trackers()
        held = [
            one for tracker in trackers for one in tracker.get_states().values() if isinstance(one, torch.Generator)
        ]
        return cls(
            torch.random.get_rng_state(),
            tuple((device, state) for device, state in states if state is not None),
            random.getstate(),
            None if numpy is None else numpy.get_state(),
            tuple((one, one.get_state()) for one in (*others, *held)),
            tuple((one, dict(one.get_states())) for one in trackers),
        )

    def set(self) -> None:
        torch.random.set_rng_state(self.cpu)
        for device, state in self.devices:
            set_random_state(device, state)
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy_random().set_state(self.numpy)
        for one, state in self.others:
            one.set_state(state)
        for tracker, states in self.tracked:
            tracker.set_states(dict(states))


@contextmanager
def drawn_from(state: RandomState) -> Iterator[None]:
    """Set the generators to ``state`` inside the block, and restore them afterwards."""
    before = RandomState.now((device for device, _ in state.devices), (one for one, _ in state.others))
    state.set()
    try:
        yield
    finally:
        before.set()


_TRACKER = "_CUDA_RNG_STATE_TRACKER"
"""The global variable with a tracker, in Megatron and in libraries that took its code, such as DeepSpeed."""


def _trackers() -> list[Any]:
    """Return the trackers, which store separate generator states for parts of a forward."""
    found = (vars(sys.modules[name]).get(_TRACKER) for name in _modules_with_trackers(len(sys.modules)))
    return [one for one in found if hasattr(one, "get_states") and hasattr(one, "set_states")]


@lru_cache(maxsize=1)
def _modules_with_trackers(imported: int) -> list[str]:
    """Return the names of modules with the variable; the number of ``imported`` modules is only the cache's key."""
    return [name for name, one in list(sys.modules.items()) if _TRACKER in getattr(one, "__dict__", {})]


def _numpy_random() -> Any:
    """Return ``numpy.random`` if the script has imported it, else None."""
    return sys.modules.get("numpy.random")


@dataclass(frozen=True)
class AutocastState:
    """Whether autocast is enabled for a device type, the dtype to which it casts, and whether it caches casts."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls, device_types: Iterable[str]) -> tuple[AutocastState, ...]:
        cache = torch.is_autocast_cache_enabled()
        return tuple(
            cls(one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one), cache)
            for one in sorted(set(device_types))
        )


@contextmanager
def autocast(states: Iterable[AutocastState], *, enabled: bool = True) -> Iterator[None]:
    """Set autocast to these states inside the block; disable it if ``enabled`` is false."""
    with ExitStack() as stack:
        for one in states:
            stack.enter_context(
                torch.autocast(one.device_type, one.dtype, enabled=enabled and one.enabled, cache_enabled=one.cache)
            )
        yield


def normal(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal numbers on the CPU, drawn in ``dtype`` even inside of a replay in another precision."""
    with _disable_current_modes():
        return torch.randn(shape, generator=generator, dtype=dtype)


def normal_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal numbers of a tensor's shape, dtype and device."""
    return normal(tensor.shape, generator, tensor.dtype).to(tensor.device)
