"""What holds for every launch of a run."""

from __future__ import annotations

from dataclasses import dataclass

from harness.evidence.trace import SKETCH_ABOVE


@dataclass(frozen=True)
class Settings:
    """How cells are launched, whichever they are.

    ``time_limit`` is in seconds, for one launch. ``oversubscribe`` lets several ranks share a CUDA device, over gloo.
    Of weights and gradients with more than ``sketch_above`` entries a sketch is recorded.
    """

    time_limit: float = 120.0
    oversubscribe: bool = False
    sketch_above: int = SKETCH_ABOVE
