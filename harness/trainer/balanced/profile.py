"""What each block costs on a device, measured on a real micro-batch; the module stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from harness.trainer.balanced.blocks import (
    Block,
    Holder,
    bytes_of,
    held_tensors,
    in_training,
    same_random_numbers,
    tensors_in,
)
from harness.trainer.balanced.stages import BlockCost, Profile, Shared
from harness.trainer.precision_plugins import map_tensors

REPEATS = 7


@dataclass
class Activations:
    """The storages that blocks keep for backward; those of travelling tensors have a number, the same in all blocks."""

    kept: dict[int, dict[int, int]] = field(default_factory=dict)  # number → block → bytes
    travelling: list[int] = field(default_factory=list)  # the number of each tensor that enters the next block
    numbers: int = 0

    def note(self, block: int, entering: list[Tensor], saved: Mapping[int, int], leaving: list[Tensor]) -> None:
        """Note which travelling tensors a block keeps; ``saved`` has bytes by the address of the storage."""
        known = dict(zip(map(_address, entering), self.travelling, strict=True)) if self.travelling else {}
        for tensor in [*entering, *leaving]:
            if known.setdefault(_address(tensor), self.numbers) == self.numbers:
                self.numbers += 1
        for address, number in known.items():
            if address in saved:
                self.kept.setdefault(number, {})[block] = saved[address]
        self.travelling = [known[_address(tensor)] for tensor in leaving]

    def shared(self, names: Sequence[str]) -> tuple[Shared, ...]:
        """Return what several blocks keep."""
        return tuple(
            Shared(f"output of {names[min(blocks)]}", tuple(sorted(blocks)), min(blocks.values()))
            for blocks in self.kept.values()
            if len(blocks) > 1
        )


@dataclass(frozen=True)
class Measured:
    """One block's times and sizes, and what it returned."""

    forward: float
    backward: float
    saved: dict[int, int]
    outputs: Any


def profile(
    module: nn.Module,
    blocks: Sequence[Block],
    inputs: Any,
    device: torch.device,
    optimizer_state: Mapping[str, int] | None = None,
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
        inputs: What the module is given, of one micro-batch.
        device: Where to run.
        optimizer_state: Bytes by the name of the parameter, see ``optimizer_state.py``. None: no state.
        repeats: Of the measurement of each block.

    """
    held = held_tensors(module)
    inputs = map_tensors(lambda tensor: tensor.detach().to(device), inputs)
    value, activations, costs = inputs, Activations(), []
    with same_random_numbers(), in_training(module):
        for index, block in enumerate(blocks):
            copies = {name: _copy(held[name], device) for name in block.holds}
            ours = {_address(tensor) for tensor in copies.values()}

            def measure(
                value: Any = value, block: Block = block, ours: set[int] = ours, index: int = index
            ) -> Measured:
                return _measure(block, value, inputs, ours, repeats, activations, index)

            named = {f"held.0.{name}": tensor for name, tensor in copies.items()}
            measured: Measured = functional_call(Holder(module), named, (measure,))
            value = measured.outputs
            costs.append(
                BlockCost(
                    name=block.name,
                    seconds=measured.forward + measured.backward,
                    saved_bytes=sum(measured.saved.values()),
                    state_bytes=sum(_state_bytes(name, held[name], optimizer_state or {}) for name in block.holds),
                    output_bytes=sum(bytes_of(tensor) for tensor in tensors_in(value)),
                    forward_share=measured.forward / ((measured.forward + measured.backward) or 1.0),
                )
            )
    ties = tuple(
        Shared(name, holders, _state_bytes(name, held[name], optimizer_state or {}))
        for name, holders in _holders(blocks).items()
        if len(holders) > 1
    )
    return Profile(tuple(costs), ties, activations.shared([block.name for block in blocks]))


def _measure(
    block: Block, value: Any, inputs: Any, ours: set[int], repeats: int, activations: Activations, index: int
) -> Measured:
    """Run the block ``repeats`` times after a warm-up in which what it keeps is noted."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in ours:
            saved[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    entering = _arrived(value)
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = block.run(entering, inputs)
    activations.note(index, tensors_in(entering), saved, tensors_in(outputs))
    _backward(outputs)
    returned = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), outputs)
    del entering, outputs

    clock = _clock(tensors_in(returned))
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
    return Measured(_median(forwards), _median(backwards), saved, returned)


def _arrived(value: Any) -> Any:
    """Return copies of travelling tensors, such that a block may change them in place and gives them gradients."""

    def arrive(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad).clone()

    with torch.enable_grad():
        return map_tensors(arrive, value)


def _backward(outputs: Any) -> None:
    roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _clock(outputs: list[Tensor]) -> Callable[[], Any]:
    """Return what takes the time: an event of the device's stream, or a clock of the cpu.

    One thread's own time does not count when other processes have its core.
    """
    if not any(tensor.is_cuda for tensor in outputs):
        return thread_time if torch.get_num_threads() == 1 else perf_counter

    def event() -> torch.cuda.Event:
        recorded: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        recorded.record()
        return recorded

    return event


def _median(spans: list[tuple[Any, Any]]) -> float:
    """Return the median of the seconds between pairs of times."""
    if not isinstance(spans[0][0], float):
        spans[-1][1].synchronize()
        return float(median(start.elapsed_time(end) / 1000 for start, end in spans))
    return float(median(end - start for start, end in spans))


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a parameter's values with gradients of their own, or a copy of a buffer."""
    if isinstance(tensor, nn.Parameter):
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)
    return tensor.detach().to(device, copy=True)


def _state_bytes(name: str, tensor: Tensor, optimizer_state: Mapping[str, int]) -> int:
    """Return the bytes of a parameter, its gradient and its optimizer state, or of a buffer."""
    return bytes_of(tensor) * (1 + tensor.requires_grad) + optimizer_state.get(name, 0)


def _holders(blocks: Sequence[Block]) -> dict[str, tuple[int, ...]]:
    holders: dict[str, tuple[int, ...]] = {}
    for index, block in enumerate(blocks):
        for name in block.holds:
            holders[name] = (*holders.get(name, ()), index)
    return holders


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
