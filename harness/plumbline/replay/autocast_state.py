"""The state of autocast for each type of device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AutocastState:
    """Whether autocast is enabled for a device type, the dtype to which it casts, and whether it caches casts."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls, device_types: Iterable[str]) -> tuple[AutocastState, ...]:
        """Return the current state for each of these device types."""
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
