"""The settings that hold for every launch of a run."""

from __future__ import annotations

from dataclasses import dataclass

from plumbline.evidence.trace import STORE_ABOVE


@dataclass(frozen=True)
class Settings:
    """How every cell is launched.

    ``time_limit`` is in seconds, for one launch. ``oversubscribe`` lets several ranks share a CUDA device, over gloo.
    Weights and gradients with more than ``store_above`` entries are written once for all ranks that hold equal ones.
    """

    time_limit: float = 120.0
    oversubscribe: bool = False
    store_above: int = STORE_ABOVE
