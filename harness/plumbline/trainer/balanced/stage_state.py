"""A stage's weights and optimizer state, and checkpoints of all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from plumbline.trainer.balanced.blocks import held_tensors
from plumbline.trainer.balanced.shared_weights import Beacon
from plumbline.trainer.checkpoints import TrainingState
from plumbline.trainer.nested import map_tensors
from plumbline.trainer.optimizers import parameters_of


@dataclass(frozen=True)
class Slot:
    """A weight in this stage's part of an optimizer: its ``number`` in the whole, and whether this stage owns it."""

    number: int
    weight: nn.Parameter
    owned: bool


@dataclass(frozen=True)
class StageOptimizer:
    """The part of an optimizer that a stage keeps.

    ``group_sizes`` and ``dtypes`` describe all parameters of the whole optimizer. ``beacon``: whether a ``Beacon``'s
    parameter follows the module's.
    """

    slots: tuple[Slot, ...]
    group_sizes: tuple[int, ...]
    dtypes: tuple[Any, ...]
    beacon: bool

    @property
    def counted(self) -> list[bool]:
        return [slot.owned for slot in self.slots] + [False] * self.beacon

    def whole_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        whole, start = [], 0
        for group, size in zip(groups, self.group_sizes, strict=True):
            whole.append({**group, "params": list(range(start, start + size))})
            start += size
        return whole


def keep_own(optimizer: Optimizer, names: dict[int, str], state: StageState, beacon: Beacon | None) -> StageOptimizer:
    """Remove the parameters of other stages from an optimizer. ``names`` has the module's parameter names by id."""
    everything = [group["params"] for group in optimizer.param_groups]
    flat = [weight for group in everything for weight in group]
    slots = tuple(
        Slot(number, weight, names[id(weight)] in state.owned)
        for number, weight in enumerate(flat)
        if names[id(weight)] in state.held
    )
    here = {id(slot.weight) for slot in slots}
    for group in optimizer.param_groups:
        group["params"] = [weight for weight in group["params"] if id(weight) in here]
    for weight in flat:
        if id(weight) not in here:
            optimizer.state.pop(weight, None)
    if beacon is not None:
        beacon.add_to(optimizer)
    dtypes = tuple(weight.dtype for weight in flat)
    return StageOptimizer(slots, tuple(map(len, everything)), dtypes, beacon is not None)


@dataclass
class StageState(TrainingState):
    """The state of a rank that holds one stage.

    ``held`` and ``owned`` name parameters and buffers. If several stages hold one, the first of them owns it.
    ``control`` is a gloo group of all stages of this pipeline. Only the first pipeline, whose ``replica`` is 0, writes
    checkpoints. ``waiting(description)`` is a context for operations in which stages wait for each other.
    """

    held: frozenset[str] = frozenset()
    owned: frozenset[str] = frozenset()
    control: Any = None
    replica: int = 0
    waiting: Callable[..., AbstractContextManager[None]] = field(default=nullcontext)
    parts: list[StageOptimizer] = field(default_factory=list)

    def tensors(self) -> dict[str, Any]:
        """Return the state of module, optimizers and precision of all stages on rank 0. All ranks must call this."""
        if self.replica:
            return {}
        tensors = held_tensors(self.module)
        share = (
            {name: on_cpu(tensors[name]) for name in self.owned},
            [self._states(part, optimizer) for part, optimizer in zip(self.parts, self.optimizers, strict=True)],
            self._masters(),
        )
        shares: list[Any] = [None] * dist.get_world_size(self.control)
        with self.waiting("a checkpoint"):
            dist.gather_object(share, shares if dist.get_rank() == 0 else None, 0, self.control)
        if dist.get_rank():
            return {}
        weights = merged(weights for weights, _, _ in shares)
        states = [merged(each) for each in zip(*(states for _, states, _ in shares), strict=True)]
        masters = [merged(each) for each in zip(*(masters for _, _, masters in shares), strict=True)]
        names = {id(tensor): name for name, tensor in tensors.items()}
        return {
            "module": {
                key: weights[names[id(value)]] if id(value) in names else value
                for key, value in self.module.state_dict(keep_vars=True).items()
            },
            "optimizers": [
                {"state": whole, "param_groups": part.whole_groups(optimizer.state_dict()["param_groups"])}
                for whole, part, optimizer in zip(states, self.parts, self.optimizers, strict=True)
            ],
            "precision": {
                **self.precision.state_dict(),
                **({"masters": [list(each.values()) for each in masters]} if masters else {}),
            },
        }

    def load_tensors(self, checkpoint: dict[str, Any]) -> None:
        """Load this stage's part of the optimizers and the precision. The module's weights are already loaded."""
        for part, optimizer, saved in zip(self.parts, self.optimizers, checkpoint["optimizers"], strict=True):
            groups, position = [], 0
            for whole, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
                groups.append({**whole, "params": list(range(position, position + len(own["params"])))})
                position += len(own["params"])
            numbers = [slot.number for slot in part.slots]
            state = {at: saved["state"][number] for at, number in enumerate(numbers) if number in saved["state"]}
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        precision = dict(checkpoint["precision"])
        if "masters" in precision:
            precision["masters"] = [
                [dict(zip(self._halves(part.dtypes), masters, strict=True))[slot.number] for slot in self._half(part)]
                for part, masters in zip(self.parts, precision["masters"], strict=True)
            ]
        self.precision.load_state_dict(precision)

    def take_whole(self, module: dict[str, Any]) -> None:
        """Load all weights into the module, on the CPU, as after training on one device."""
        names = {id(value): key for key, value in self.module.state_dict(keep_vars=True).items()}
        for tensor in held_tensors(self.module).values():
            if id(tensor) in names:
                tensor.data = module[names[id(tensor)]].clone()

    def _states(self, part: StageOptimizer, optimizer: Optimizer) -> dict[int, Any]:
        parameters = parameters_of(optimizer)
        return {
            slot.number: map_tensors(on_cpu, optimizer.state[parameter])
            for slot, parameter in zip(part.slots, parameters, strict=False)  # a beacon can follow
            if slot.owned and parameter in optimizer.state
        }

    def _masters(self) -> list[dict[int, Tensor]]:
        return [
            {slot.number: on_cpu(master) for slot, master in zip(self._half(part), masters, strict=True) if slot.owned}
            for part, masters in zip(self.parts, self.precision.state_dict().get("masters", ()), strict=False)
        ]

    def _half(self, part: StageOptimizer) -> list[Slot]:
        return [slot for slot in part.slots if slot.weight.dtype is self.precision.dtype]

    def _halves(self, dtypes: Sequence[Any]) -> list[int]:
        return [number for number, dtype in enumerate(dtypes) if dtype is self.precision.dtype]


def merged(parts: Iterable[dict[Any, Any]]) -> dict[Any, Any]:
    return dict(sorted((key, value) for part in parts for key, value in part.items()))


def on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
