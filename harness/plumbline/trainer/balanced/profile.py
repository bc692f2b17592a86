"""Measures each block on a device with a real micro-batch, without changing the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from plumbline.trainer.balanced.blocks import Block, Holder, bytes_of, held_tensors
from plumbline.trainer.balanced.clock import computing_clock, median_seconds
from plumbline.trainer.balanced.memory import LiveBytes
from plumbline.trainer.balanced.optimizer_state import time_steps
from plumbline.trainer.balanced.stages import BlockCost, Profile, Shared, Travelling
from plumbline.trainer.module import in_mode
from plumbline.trainer.nested import map_tensors, tensors_in

REPEATS = 7


@dataclass
class Journeys:
    """The storages that are passed between blocks; ``here`` has that of each tensor that enters the next block."""

    every: list[Travelling] = field(default_factory=list)
    here: list[Travelling] = field(default_factory=list)

    def note(self, block: int, entering: list[Tensor], saved: Mapping[int, int], leaving: list[Tensor]) -> None:
        """Record what a block is given, keeps and returns; ``saved`` has bytes by the address of the storage."""
        known: dict[int, Travelling] = dict(zip(map(address, entering), self.here, strict=True)) if self.here else {}
        for tensors, ends in ((entering, "enters"), (leaving, "leaves")):
            for where, tensor in {address(tensor): tensor for tensor in tensors}.items():
                if where not in known:
                    known[where] = Travelling(tensor.untyped_storage().nbytes())
                    self.every.append(known[where])
                getattr(known[where], ends).append(block)
        for where, journey in known.items():
            if where in saved:
                journey.keepers.append(block)
        self.here = [known[address(tensor)] for tensor in leaving]


@dataclass(frozen=True)
class BlockProfile:
    """One block's times and sizes, and its outputs."""

    forward: float
    backward: float
    saved_bytes: int
    transient_bytes: int
    outputs: Any


def profile(
    module: nn.Module,
    blocks: Sequence[Block],
    inputs: Any,
    device: torch.device,
    optimizer_state: Mapping[str, int] | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    repeats: int = REPEATS,
) -> Profile:
    """Run each block forward and backward and return what it costs.

    One block at a time is on ``device``, with copies of its buffers; its parameters are copied unless they are there
    already. Seconds are medians after a warm-up, taken with as many threads as are set. They are those of a micro-batch
    that is not the first of its step: gradients exist and are added to.

    Args:
        module: In training mode while it is measured, then in the modes it was in. Parameters, gradients, buffers and
            random numbers stay as they are.
        blocks: Of ``module``, in order.
        inputs: What the module is given, of one micro-batch. Each device has the batch: it is not counted.
        device: Where to run.
        optimizer_state: Bytes by the name of the parameter, see ``optimizer_state.py``. None: no state.
        optimizers: Of the module's parameters; copies of them are stepped.
        repeats: Of the measurement of each block.
    """
    held = held_tensors(module)
    inputs = map_tensors(lambda tensor: tensor.detach().to(device), inputs)
    batch = {address(tensor) for tensor in tensors_in(inputs)}
    value, journeys, costs = (), Journeys(), []
    with torch.random.fork_rng([device] if device.type == "cuda" else []), in_mode(module, training=True):
        for index, block in enumerate(blocks):
            copies = {name: _copy(held[name], device) for name in block.holds}
            ours = batch | {address(tensor) for tensor in copies.values()}

            def measure(
                value: Any = value, block: Block = block, ours: set[int] = ours, index: int = index
            ) -> BlockProfile:
                return _measure(block, value, inputs, ours, device, repeats, journeys, index)

            named = {f"held.{name}": tensor for name, tensor in copies.items()}
            measured: BlockProfile = functional_call(Holder(module), named, (measure,))
            value = measured.outputs
            parameters = {id(held[name]): tensor for name, tensor in copies.items()}
            steps = time_steps(optimizers, parameters, computing_clock(device), (repeats + 1) // 2)
            costs.append(
                BlockCost(
                    name=block.name,
                    seconds=measured.forward + measured.backward,
                    saved_bytes=measured.saved_bytes,
                    state_bytes=sum(_state_bytes(name, held[name], optimizer_state or {}) for name in block.holds),
                    output_bytes=sum(bytes_of(tensor) for tensor in tensors_in(value)),
                    forward_share=measured.forward / ((measured.forward + measured.backward) or 1.0),
                    transient_bytes=measured.transient_bytes,
                    optimizer_seconds=median_seconds(steps),
                )
            )
    ties = tuple(
        Shared(
            name,
            holders,
            _state_bytes(name, held[name], optimizer_state or {}),
            min(_step_seconds(held[name], blocks[holder], costs[holder], held) for holder in holders),
        )
        for name, holders in _holders(blocks).items()
        if len(holders) > 1
    )
    return Profile(tuple(costs), ties, tuple(journeys.every))


def _measure(
    block: Block,
    value: Any,
    inputs: Any,
    ours: set[int],
    device: torch.device,
    repeats: int,
    journeys: Journeys,
    index: int,
) -> BlockProfile:
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if address(tensor) not in ours:
            saved[address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    arriving = _arrived(value)
    entering = [tensor.detach() for tensor in tensors_in(arriving)]
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = block.run(arriving, inputs)
    journeys.note(index, entering, saved, tensors_in(outputs))
    returned = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), outputs)
    _backward(outputs)

    entering = _arrived(value)
    with LiveBytes() as live:
        with torch.enable_grad():
            outputs = block.run(entering, inputs)
        between = live.now
        _backward(outputs)
    del entering, outputs

    clock = computing_clock(device)
    forwards, backwards = [], []
    for _ in range(repeats):
        torch.clear_autocast_cache()  # each micro-batch casts the weights anew
        entering = _arrived(value)
        start = clock()
        with torch.enable_grad():
            outputs = block.run(entering, inputs)
        middle = clock()
        _backward(outputs)
        forwards.append((start, middle))
        backwards.append((middle, clock()))
        del entering, outputs
    return BlockProfile(
        median_seconds(forwards), median_seconds(backwards), sum(saved.values()), live.peak - between, returned
    )


def _arrived(value: Any) -> Any:
    def arrive(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad).clone()

    with torch.enable_grad():
        return map_tensors(arrive, value)


def _backward(outputs: Any) -> None:
    roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)
    return tensor.detach().to(device, copy=True)


def _state_bytes(name: str, tensor: Tensor, optimizer_state: Mapping[str, int]) -> int:
    return bytes_of(tensor) * (1 + tensor.requires_grad) + optimizer_state.get(name, 0)


def _step_seconds(tensor: Tensor, block: Block, cost: BlockCost, held: Mapping[str, Tensor]) -> float:
    """Return one parameter's share of a block's optimizer step, by its elements."""
    trained = sum(held[name].numel() for name in block.holds if held[name].requires_grad)
    return cost.optimizer_seconds * tensor.numel() / trained if tensor.requires_grad else 0.0


def _holders(blocks: Sequence[Block]) -> dict[str, tuple[int, ...]]:
    holders: dict[str, tuple[int, ...]] = {}
    for index, block in enumerate(blocks):
        for name in block.holds:
            holders[name] = (*holders.get(name, ()), index)
    return holders


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
