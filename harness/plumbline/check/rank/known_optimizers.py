"""The optimizers of a script: which it made, how often each stepped, and the parameters of those not recorded."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakSet

from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.tensor_digest import tensor_digest
from plumbline.recording.parameter_names import ParameterNames
from plumbline.recording.parameters import parameters_of

MOST_LATE = 8
"""Optimizers after the recorded steps that are named: some scripts make one for every task."""

Entries = dict[str, dict[str, int]]
"""How many entries the parameters of optimizers have, by the optimizer's number and the parameter's name."""


class KnownOptimizers:
    """Numbers the optimizers that a script made, in their order, and counts their steps.

    ``late`` are the first ones that began to step after the recorded steps.
    """

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self._made: list[Optimizer] = []
        self._taken: dict[int, int] = {}
        self._recorded: set[int] = set()
        self._seen_late: WeakSet[Optimizer] = WeakSet()
        self.late: Entries = {}

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._made)

    def __contains__(self, optimizer: object) -> bool:
        return any(known is optimizer for known in self._made)

    @property
    def progress(self) -> dict[str, object]:
        """How many there are, how many of them began a step, and how many steps they have taken together."""
        return {"optimizers": len(self._made), "begun": len(self._taken), "steps": sum(self._taken.values())}

    @property
    def have_begun(self) -> bool:
        return bool(self._taken)

    def has_begun(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self._taken

    def add(self, optimizer: Optimizer) -> None:
        """Number an optimizer, which is not known yet."""
        self._made.append(optimizer)

    def number(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer among those that the script made."""
        return self._made.index(optimizer)

    def begin(self, optimizer: Optimizer) -> None:
        self._taken.setdefault(id(optimizer), 0)

    def end(self, optimizer: Optimizer) -> None:
        self._taken[id(optimizer)] += 1

    def taken(self, optimizer: Optimizer) -> int:
        return self._taken[id(optimizer)]

    def record(self, optimizer: Optimizer) -> None:
        self._recorded.add(id(optimizer))

    def have_taken(self, steps: int) -> bool:
        """Return whether all optimizers that have begun to step have taken at least so many."""
        return all(self._taken[id(one)] >= steps for one in self._made if self.has_begun(one))

    def parameters(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self._made for parameter in parameters_of(optimizer))

    def unoptimized(self, *, with_digests: bool) -> Facts:
        """Return the parameters of called modules that require a gradient and are in no optimizer, by their names.

        Each with its shape, whether it has a gradient, and a digest of its values where that is asked for.
        """
        known = set(map(id, self.parameters()))
        found = (one for root in self._names.roots for one in root.parameters())
        return {
            self._names.of_one(one): {
                "shape": list(one.shape),
                "gradient": one.grad is not None,
                "digest": tensor_digest(one) if with_digests else None,
            }
            for one in found
            if one.requires_grad and id(one) not in known
        }

    def unstepped(self) -> Entries:
        """Return the trainable parameters of optimizers of which no step was recorded, each parameter once."""
        recorded = [one for one in self._made if id(one) in self._recorded]
        seen = {id(parameter) for optimizer in recorded for parameter in parameters_of(optimizer)}
        found: Entries = {}
        for place, optimizer in enumerate(self._made):
            own = {name: one.numel() for name, one in self._trainable(optimizer) if id(one) not in seen}
            seen.update(map(id, parameters_of(optimizer)))
            if own:
                found[str(place)] = own
        return found

    def note_late(self, optimizer: Optimizer) -> bool:
        """Note an optimizer that steps after the recorded steps; return whether ``late`` has changed."""
        if optimizer in self or optimizer in self._seen_late:
            return False
        self._seen_late.add(optimizer)
        if len(self.late) == MOST_LATE:
            return False
        self.late[str(len(self.late))] = {name: one.numel() for name, one in self._trainable(optimizer)}
        return True

    def _trainable(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        named = zip(self._names.of(optimizer), parameters_of(optimizer), strict=True)
        return ((name, one) for name, one in named if one.requires_grad)
