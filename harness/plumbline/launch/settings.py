"""The settings of every launch of a run."""

from __future__ import annotations

from dataclasses import dataclass

from plumbline.evidence.trace import STORE_ABOVE


@dataclass(frozen=True)
class Settings:
    """The settings of every launch.

    ``time_limit`` is in seconds per launch. With ``oversubscribe``, ranks share devices; on CUDA, they then communicate
    over gloo. Weights and gradients with more than ``store_above`` entries are written once for all ranks that have
    equal values.
    """

    time_limit: float = 120.0
    oversubscribe: bool = False
    store_above: int = STORE_ABOVE
