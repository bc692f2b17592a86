"""Where a training is interrupted, and the loops of one that can be, in source code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from plumbline.workloads.generated import Recipe


@dataclass(frozen=True)
class Interruption:
    """The interruption of a recipe's training; ``names`` are the columns of a batch."""

    recipe: Recipe
    names: str

    @cached_property
    def steps(self) -> int:
        """Optimizer steps before it."""
        assert self.recipe.interrupt_after is not None
        return self.recipe.interrupt_after

    @property
    def epoch(self) -> int:
        """The epoch in which training goes on."""
        return divmod(self.steps, self._windows)[0]

    @property
    def batches(self) -> int:
        """Batches of that epoch that were trained on before it, on each rank."""
        return divmod(self.steps, self._windows)[1] * self.recipe.accumulate

    @property
    def all_batches(self) -> int:
        """Batches of all epochs that were trained on before it, on each rank."""
        return self.epoch * self.recipe.steps_per_epoch + self.batches

    @property
    def _windows(self) -> int:
        return -(-self.recipe.steps_per_epoch // self.recipe.accumulate)

    @property
    def epochs(self) -> str:
        """The head of the loop over epochs, of which a resumed training leaves out those that are over."""
        begin = f"{self.epoch} if resume else 0, " if self.epoch else ""
        return f"for epoch in range({begin}{self.recipe.epochs}):"

    def rest(self, loader: str, skipping: str) -> str:
        """Return the loader of an epoch, which is ``skipping`` where training goes on."""
        if not self.batches:
            return loader
        return f"{skipping} if resume{f' and epoch == {self.epoch}' if self.recipe.epochs > 1 else ''} else {loader}"

    def numbered(self, loader: str) -> str:
        """Return the head of the loop over a loader, whose batches are numbered from the first epoch on, from 1."""
        before = f"{self.recipe.steps_per_epoch} * epoch + " if self.recipe.epochs > 1 else ""
        return f"for number, ({self.names}) in enumerate({loader}, {before.removeprefix('1 * ')}1):"

    def slice_of(self, loader: str) -> str:
        """Return the batches of all epochs from ``first`` to ``stop``, two variables, as an expression."""
        epochs = self.recipe.epochs
        batches = f"[batch for _ in range({epochs}) for batch in {loader}]" if epochs > 1 else f"[*{loader}]"
        return f"{batches}[first:stop]"
