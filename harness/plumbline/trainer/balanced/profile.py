"""Measures each block with a real micro-batch, and the steps of copied optimizers, without changing the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.optim import optimizer as torch_optimizer

from plumbline.devices.calls import OutOfMemoryError, forked
from plumbline.trainer.balanced.blocks import Block, Holder, bytes_of, held_tensors
from plumbline.trainer.balanced.measurements import LiveBytes, computing_clock, median_seconds
from plumbline.trainer.balanced.stage_plan import BlockCost, Profile, Shared, Travelling
from plumbline.trainer.module import in_mode
from plumbline.trainer.nested import map_tensors, tensors_in


def optimizer_state_bytes(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, int]:
    """Return the bytes of optimizer state of each parameter by name.

    A copy of the optimizer, without state, steps each parameter on the meta device, where nothing is allocated. If that
    fails, it steps a copy of the parameter with a gradient of zeros, first dense, then sparse.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    sizes: dict[str, int] = {}
    with _without_hooks():
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        name = names[id(parameter)]
                        sizes[name] = sizes.get(name, 0) + _stepped_bytes(optimizer, group, parameter)
    return sizes


def _stepped_bytes(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    refusal: Exception | None = None
    for kind in ("meta", "dense", "sparse"):
        values = torch.empty_like(parameter, device="meta") if kind == "meta" else parameter.detach().clone()
        gradient = torch.zeros_like(values)
        values.requires_grad_().grad = gradient.to_sparse(1) if kind == "sparse" and values.dim() else gradient
        copied = _without_state(optimizer, [{**group, "params": [values]}])
        try:
            copied.step()
        except (RuntimeError, NotImplementedError) as error:
            refusal = refusal if kind == "sparse" else error
            continue
        return sum(bytes_of(tensor) for tensor in tensors_in(list(copied.state.values())))
    assert refusal is not None
    raise refusal


def time_steps(
    optimizers: Sequence[torch.optim.Optimizer], copies: Mapping[int, Tensor], clock: Callable[[], Any], repeats: int
) -> list[tuple[Any, Any]]:
    """Step copies of the optimizers, after a warm-up, and return the points in time before and after each step.

    ``copies`` has copies of parameters by the ``id`` of the parameter. Those without gradients are left out, and none
    is changed. Returns an empty list if there is nothing to step, or not enough memory for another copy.
    """
    try:
        stepping = _copies_to_step(optimizers, copies)
        with _without_hooks():
            spans = []
            for _ in range(repeats + 1):
                begin = clock()
                for copied in stepping:
                    copied.step()
                spans.append((begin, clock()))
    except OutOfMemoryError:
        return []
    return spans[1:] if stepping else []


def _copies_to_step(
    optimizers: Sequence[torch.optim.Optimizer], copies: Mapping[int, Tensor]
) -> list[torch.optim.Optimizer]:
    stepping = []
    for optimizer in optimizers:
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            own = [copies[id(parameter)] for parameter in group["params"] if id(parameter) in copies]
            groups.append({**group, "params": [_with_gradient(one) for one in own if one.grad is not None]})
        if any(group["params"] for group in groups):
            stepping.append(_without_state(optimizer, groups))
    return stepping


def _with_gradient(tensor: Tensor) -> Tensor:
    values = tensor.detach().clone().requires_grad_()
    values.grad = tensor.grad
    return values


def _without_state(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.state = type(optimizer.state)(dict)
    copied.param_groups = groups
    # Hooks, and a step that a scheduler has wrapped, belong to the original.
    copied._optimizer_step_pre_hooks = type(optimizer._optimizer_step_pre_hooks)()
    copied._optimizer_step_post_hooks = type(optimizer._optimizer_step_post_hooks)()
    copied.__dict__.pop("step", None)
    return copied


@contextmanager
def _without_hooks() -> Iterator[None]:
    every: list[Any] = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    kept = [dict(hooks) for hooks in every]
    for hooks in every:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(every, kept, strict=True):
            hooks.update(own)


REPEATS = 7


@dataclass
class Journeys:
    """The storages that pass between blocks. ``here`` has the storage of each tensor that enters the next block."""

    every: list[Travelling] = field(default_factory=list)
    here: list[Travelling] = field(default_factory=list)

    def note(self, block: int, entering: list[Tensor], saved: Mapping[int, int], leaving: list[Tensor]) -> None:
        """Record the tensors that enter and leave a block. ``saved`` has the bytes that it keeps by storage address."""
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
    """The measured seconds and bytes of one block, and its outputs."""

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
    """Run each block of ``module`` on ``device``, forward and backward, and return the costs.

    ``inputs`` are the module's inputs for one micro-batch. Every device has them, so they are not counted. Only one
    block at a time is on the device, with copies of its buffers. Seconds are medians of ``repeats`` runs after a
    warm-up. Gradients already exist in these runs, as for all but the first micro-batch of a step. ``optimizer_state``
    has bytes by the name of the parameter. Copies of ``optimizers`` are stepped. The module, its gradients and the
    random states do not change.
    """
    held = held_tensors(module)
    inputs = map_tensors(lambda tensor: tensor.detach().to(device), inputs)
    batch = {address(tensor) for tensor in tensors_in(inputs)}
    value, journeys, costs = (), Journeys(), []
    with forked([device]), in_mode(module, training=True):
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
        torch.clear_autocast_cache()  # because each micro-batch casts the weights again
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
