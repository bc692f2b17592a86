"""What an explanation is, and what a prediction may be made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harness.core.trace import Step, Tensors
from harness.judge.examination import Truth


@dataclass(frozen=True)
class Scene:
    """One rank at one step: everything that a prediction may be made from.

    ``index`` counts steps, ``rank`` is the rank, ``world`` the number of ranks. ``accumulate`` and ``clip_norm``
    are the workload's. ``trained`` names the parameters that are not frozen. ``earlier`` is the gradient this rank
    was handed one step before, None at the first.
    """

    index: int
    rank: int
    world: int
    step: Step
    truth: Truth
    accumulate: int
    clip_norm: float | None
    trained: frozenset[str]
    earlier: Tensors | None

    @property
    def micro_batches(self) -> int:
        """How many micro-batches this step really had."""
        return len(self.truth.parts)

    @property
    def place(self) -> str:
        """The scene in words."""
        return f"step {self.index}" + (f" on rank {self.rank}" if self.world > 1 else "")


@dataclass(frozen=True)
class Explanation:
    """A known mistake.

    ``predict`` yields the gradients that it could have handed to the optimizer; nothing where it does not apply.
    ``saw`` completes "gradients are …", with the figures of the scene; ``look`` says where to look.
    """

    name: str
    family: str
    saw: str
    look: str
    predict: Callable[[Scene], Iterable[Tensors]]
