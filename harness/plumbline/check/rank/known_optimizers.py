"""Tracks a script's optimizers: which there are, how often each stepped, and the parameters without recorded steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.low_rank import factors
from plumbline.check.rank.tensor_digest import tensor_digest
from plumbline.recording.flat_sharding import part_of
from plumbline.recording.parameters import ParameterNames, RegisteredParameters, parameters_of

MOST_LATE = 8
"""The most optimizers to name that first step after the recording. Some scripts create one for every task."""

Entries = dict[str, dict[str, int]]
"""The number of entries of optimizers' parameters, by the optimizer's number and the parameter's name."""


class KnownOptimizers:
    """Numbers a script's optimizers in the order of their creation, and counts their steps.

    An optimizer that steps several sets of parameters, one after the other, has a number for each of these parts.
    ``late`` has the first optimizers that began to step after the recorded steps.
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
        """How many optimizers there are, how many of them began a step, and how many steps they took together."""
        return {"optimizers": len(self._made), "begun": len(self._taken), "steps": sum(self._taken.values())}

    @property
    def have_begun(self) -> bool:
        return bool(self._taken)

    def has_begun(self, optimizer: Optimizer) -> bool:
        return self.number(optimizer) in self._taken

    def add(self, optimizer: Optimizer, *, found: bool = False) -> None:
        """Number a new optimizer. ``found``: it can belong to another training, and may never step."""
        self._made.append(optimizer)
        if found:
            self._found.append(optimizer)
        if self._registered is None:
            self._registered = RegisteredParameters(lambda: len(self._made))

    def number(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer, or of the part of it that steps now."""
        own = parameters_of(optimizer)
        numbers = [number for number, one in enumerate(self._made) if one is optimizer]
        for number in numbers:
            known = self._parts.get(number, own)
            if not known or not own or known[0] is own[0] or {*map(id, known)} & {*map(id, own)}:
                return number
        self._made.append(optimizer)
        return len(self._made) - 1

    def place(self, number: int) -> tuple[int, int]:
        """Return the number of the optimizer's first part, and the index of the part with this number."""
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
        """Return whether all optimizers that have begun to step have taken at least this many steps."""
        return all(taken >= steps for taken in self._taken.values())

    def parameters(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self._made for parameter in parameters_of(optimizer))

    def unoptimized(self, copied: Iterable[Tensor] = (), *, with_digests: bool) -> Facts:
        """Return, by name, the parameters of called modules that require a gradient and are in no optimizer.

        An entry has the parameter's shape, or the shapes of the parameters in a flat one (``shapes``). It says whether
        the parameter has a gradient; whether it is a flat parameter, or a part of one, with entries on this rank
        (``in_flat``); whether it was added to its module after the model's first optimizer was created (``later``);
        whether the model has frozen parameters (``beside_frozen``); and whether a later one is a factor of a low-rank
        adapter (``adapts``). Later parameters, or all of them if ``with_digests``, have a digest of their values.
        Parameters in ``copied`` are left out, because optimizers hold copies of them.
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
                        continue  # it is part of a module that is also called on its own
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
        """Return the trainable parameters of optimizers without a recorded step, each parameter once."""
        recorded = [one for one in self._made if id(one) in self._recorded]
        seen = {id(parameter) for optimizer in recorded for parameter in parameters_of(optimizer)}
        found: Entries = {}
        for index, optimizer in enumerate(self._made):
            if self._is_elsewhere(optimizer):
                continue
            own = {name: one.numel() for name, one in self._trainable(optimizer) if id(one) not in seen}
            seen.update(map(id, parameters_of(optimizer)))
            if own:
                found[str(index)] = own
        return found

    def _is_elsewhere(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer that was only found has no parameter of the modules that were called."""
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
    """Return the ids of a module's trainable matrices that are factors of low-rank adapters of frozen matrices."""
    named = dict(root.named_parameters())
    found = factors({name: (tuple(one.shape), one.requires_grad) for name, one in named.items()})
    return {id(named[name]) for name in found}


def _shapes(parameter: Tensor) -> list[torch.Size]:
    part = part_of(parameter)
    if part is None:
        return [parameter.shape]
    return part.unit.shapes if part.number is None else [part.shape]


def _has_gradient(parameter: Tensor) -> bool:
    part = part_of(parameter)
    return (parameter if part is None else part.unit.flat).grad is not None
