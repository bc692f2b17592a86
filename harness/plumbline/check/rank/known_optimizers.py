"""The optimizers of a script: which it made, how often each stepped, and the parameters of those not recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.low_rank import factors
from plumbline.check.rank.observers.tensor_digest import tensor_digest
from plumbline.recording.flat_sharding import part_of
from plumbline.recording.parameter_names import ParameterNames
from plumbline.recording.parameters import RegisteredParameters, parameters_of

MOST_LATE = 8
"""Optimizers after the recorded steps that are named: some scripts make one for every task."""

Entries = dict[str, dict[str, int]]
"""How many entries the parameters of optimizers have, by the optimizer's number and the parameter's name."""


class KnownOptimizers:
    """Numbers the optimizers that a script made, in their order, and counts their steps.

    One that steps with several sets of parameters, one after the other, has a number for each of these parts.
    ``late`` are the first ones that began to step after the recorded steps.
    """

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self._made: list[Optimizer] = []
        self._found: list[Optimizer] = []
        self._parts: dict[int, list[Tensor]] = {}
        self._taken: dict[int, int] = {}
        self._recorded: set[int] = set()
        self._seen_late: WeakSet[Optimizer] = WeakSet()
        self._registered: RegisteredParameters | None = None
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
        return self.number(optimizer) in self._taken

    def add(self, optimizer: Optimizer, *, found: bool = False) -> None:
        """Number an optimizer, which is not known yet. ``found``: it may belong to another training, and never step."""
        self._made.append(optimizer)
        if found:
            self._found.append(optimizer)
        if self._registered is None:
            self._registered = RegisteredParameters(lambda: len(self._made))

    def number(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer among those that the script made, of the part that steps now."""
        own = parameters_of(optimizer)
        numbers = [number for number, one in enumerate(self._made) if one is optimizer]
        for number in numbers:
            known = self._parts.get(number, own)
            if not known or not own or {*map(id, known)} & {*map(id, own)}:
                return number
        self._made.append(optimizer)
        return len(self._made) - 1

    def place(self, number: int) -> tuple[int, int]:
        """Return the number of an optimizer's first part, and which of its parts has this number."""
        parts = [other for other, one in enumerate(self._made) if one is self._made[number]]
        return parts[0], parts.index(number)

    def begin(self, optimizer: Optimizer) -> None:
        number = self.number(optimizer)
        self._parts[number] = parameters_of(optimizer)
        self._taken.setdefault(number, 0)

    def end(self, optimizer: Optimizer) -> None:
        self._taken[self.number(optimizer)] += 1

    def taken(self, optimizer: Optimizer) -> int:
        return self._taken[self.number(optimizer)]

    def record(self, optimizer: Optimizer) -> None:
        self._recorded.add(id(optimizer))

    def have_taken(self, steps: int) -> bool:
        """Return whether all optimizers that have begun to step have taken at least so many."""
        return all(taken >= steps for taken in self._taken.values())

    def parameters(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self._made for parameter in parameters_of(optimizer))

    def unoptimized(self, copied: Iterable[Tensor] = (), *, with_digests: bool) -> Facts:
        """Return the parameters of called modules that require a gradient and are in no optimizer, by their names.

        Each with its shape, or those of the parameters in a flat one; whether it has a gradient; whether it is a flat
        one, or a part of one, of which this rank holds entries; whether its module was given it after the first
        optimizer of the model was made; whether the model has frozen parameters; whether a later one is a factor of an
        adapter; and a digest of its values where that is asked for, or it is a later one. Optimizers hold copies of
        those that are ``copied``.
        """
        known = {id(one) for parameters in (self.parameters(), copied) for one in parameters}
        found: Facts = {}
        for root in self._names.roots:
            own = list(root.parameters())
            mine = {id(one) for one in own}
            first = next((n for n, made in enumerate(self._made) if mine & {*map(id, parameters_of(made))}), None)
            beside_frozen = not all(one.requires_grad for one in own)
            adapters: set[int] | None = None
            for one in own:
                if one.requires_grad and id(one) not in known and isinstance(one, nn.Parameter):
                    later = first is not None and self._registered is not None and self._registered.when(one) > first
                    if later and beside_frozen and adapters is None:
                        adapters = _adapters(root)
                    if not self._names.knows(one):
                        self._names.refresh()
                    name = self._names.of_one(one)
                    if found.get(name, {}).get("beside_frozen"):
                        continue  # a part of a module that is called for itself as well
                    found[name] = {
                        "shapes": [list(shape) for shape in _shapes(one)],
                        "gradient": _has_gradient(one),
                        "in_flat": part_of(one) is not None and one.numel() > 0,
                        "later": later,
                        "beside_frozen": beside_frozen,
                        "adapts": id(one) in (adapters or ()),
                        "digest": tensor_digest(one) if with_digests or later else None,
                    }
        return found

    def unstepped(self) -> Entries:
        """Return the trainable parameters of optimizers of which no step was recorded, each parameter once."""
        recorded = [one for one in self._made if id(one) in self._recorded]
        seen = {id(parameter) for optimizer in recorded for parameter in parameters_of(optimizer)}
        found: Entries = {}
        for place, optimizer in enumerate(self._made):
            if self._is_elsewhere(optimizer):
                continue
            own = {name: one.numel() for name, one in self._trainable(optimizer) if id(one) not in seen}
            seen.update(map(id, parameters_of(optimizer)))
            if own:
                found[str(place)] = own
        return found

    def _is_elsewhere(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer that was only found has nothing of the modules that were called."""
        was_found = any(one is optimizer for one in self._found)
        return was_found and not any(map(self._names.knows, parameters_of(optimizer)))

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


def _adapters(root: nn.Module) -> set[int]:
    """Return the ids of a module's trainable matrices that are factors of adapters beside frozen ones."""
    named = dict(root.named_parameters())
    found = factors({name: (tuple(one.shape), one.requires_grad) for name, one in named.items()})
    return {id(named[name]) for name in found}


def _shapes(parameter: Tensor) -> list[torch.Size]:
    part = part_of(parameter)
    if part is None:
        return [parameter.shape]
    return part.unit.shapes if part.number is None else [part.shape]


def _has_gradient(parameter: Tensor) -> bool:
    """Return whether a parameter has a gradient; of one in a flat one, another rank may hold what there is."""
    part = part_of(parameter)
    return (parameter if part is None else part.unit.flat).grad is not None
