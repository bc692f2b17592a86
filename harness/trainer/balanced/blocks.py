"""The blocks of a user's module: pieces in order, each of which needs nothing but what the piece before returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from harness.trainer.errors import MisconfigurationError
from harness.trainer.precision_plugins import map_tensors


@dataclass(frozen=True)
class Block:
    """A piece of the user's module.

    ``run(value, inputs)`` returns what travels to the next block, nested tensors: ``value`` is what the block before
    returned, ``inputs`` what the whole module is given, of the same samples. The first block's ``value`` is ``inputs``.
    """

    name: str  # qualified, in the user's module
    run: Callable[[Any, Any], Any]
    holds: tuple[str, ...]  # names of the module's parameters and buffers that it uses


def find_blocks(module: nn.Module, inputs: Any) -> tuple[Block, ...]:
    """Return the blocks of ``module`` in order.

    A module that declares its blocks has a method ``configure_blocks()`` that returns a list of its parts, of which
    each is called with what the one before returned. A Sequential has its children as blocks. The composition of the
    blocks is compared with what the module itself returns for ``inputs``.

    Args:
        module: In it nothing changes.
        inputs: What its forward is given, of a real batch.

    Raises:
        MisconfigurationError: It has no blocks that can be found, or their composition is not the module's forward.

    """
    declare = getattr(module, "configure_blocks", None)
    declared = declare() if callable(declare) else None
    if declared is not None:
        parts = _checked(module, declared)
    elif type(module).forward is nn.Sequential.forward:
        parts = list(_children(module, ""))
    else:
        raise MisconfigurationError(
            f"{type(module).__name__} is not a Sequential: write a method configure_blocks() that returns its parts in "
            "order, as a list of modules of which each is called with what the one before returned."
        )
    names = {id(tensor): name for name, tensor in held_tensors(module).items()}
    blocks = tuple(
        Block(name, partial(_call, part), tuple(names[id(tensor)] for tensor in held_tensors(part).values()))
        for name, part in parts
    )
    check_composition(module, blocks, inputs)
    return blocks


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name, shared ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists and tuples, in order."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def check_composition(module: nn.Module, blocks: Sequence[Block], inputs: Any) -> None:
    """Raise MisconfigurationError unless the blocks, one after the other, return just what the module returns."""
    expected, again = (_run(module, lambda: module(inputs)) for _ in range(2))
    if not same(expected, again):
        raise MisconfigurationError(
            f"{type(module).__name__} returns something else each time for the same batch and random numbers, so its "
            "blocks cannot be checked: call torch.use_deterministic_algorithms(True) before the training."
        )
    found = _run(module, lambda: compose(blocks, inputs))
    if not same(expected, found):
        raise MisconfigurationError(
            f"The blocks of {type(module).__name__} ({', '.join(block.name for block in blocks)}), called one after "
            f"the other, return {_described(found)}, and its forward {_described(expected)}: declare in "
            "configure_blocks() all that its forward does, in order."
        )


def compose(blocks: Sequence[Block], inputs: Any) -> Any:
    """Return what the blocks return one after the other."""
    value = inputs
    for block in blocks:
        value = block.run(value, inputs)
    return value


def same(left: Any, right: Any) -> bool:
    """Return whether nested values are equal to the last bit; NaN equals NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
            return False
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and type(left) is type(right):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and bool(left == right)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Leave the random number generators of the cpu and all devices as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def in_training(module: nn.Module) -> Iterator[None]:
    """Set the training mode, and give each module below its own mode back."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.train()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


class Holder(nn.Module):
    """Calls a function while ``functional_call`` has put other tensors into the modules that are held here."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, function: Any) -> Any:
        """Return what the function returns."""
        return function()


def _run(module: nn.Module, function: Any) -> Any:
    """Return what the function returns, with copies of the module's buffers in their place."""
    holder = Holder(module)
    copies = {name: buffer.clone() for name, buffer in holder.named_buffers()}
    with torch.no_grad(), same_random_numbers(), in_training(module):
        try:
            return functional_call(holder, copies, (function,))
        except Exception as error:
            raise MisconfigurationError(
                f"{type(module).__name__} cannot be run on the batch: {type(error).__name__}: {error}"
            ) from error


def _checked(module: nn.Module, declared: Any) -> list[tuple[str, nn.Module]]:
    """Return the names and modules that the user declared."""
    source = f"{type(module).__name__}.configure_blocks()"
    if not isinstance(declared, (list, tuple, nn.ModuleList, nn.Sequential)) or not len(declared):
        raise MisconfigurationError(f"{source} returned {type(declared).__name__}: return a list of modules.")
    names = {id(part): name for name, part in module.named_modules()}
    own = {id(tensor) for tensor in held_tensors(module).values()}
    for part in declared:
        if not isinstance(part, nn.Module):
            raise MisconfigurationError(f"{source} returned a {type(part).__name__} in its list: return modules only.")
        if any(id(tensor) not in own for tensor in held_tensors(part).values()):
            raise MisconfigurationError(
                f"{source} returned a {type(part).__name__} with weights that are not the module's, so no optimizer "
                "would train them: return parts of the module itself."
            )
    return [(names.get(id(part)) or f"{source}[{place}]", part) for place, part in enumerate(declared)]


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Return a Sequential's children, and a child's own where it is a Sequential of several parts with weights.

    Finer blocks allow every partition that coarser ones allow. Parts without weights of their own, such as an
    activation, are not worth a block where their Sequential has only one part with weights.
    """
    for name, child in module._modules.items():  # named_children leaves out a child's second place
        assert child is not None
        plain = type(child).forward is nn.Sequential.forward and not child._forward_hooks and not child._backward_hooks
        if plain and sum(any(True for _ in part.parameters()) for part in child.children()) > 1:
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _call(part: nn.Module, value: Any, inputs: Any) -> Any:
    return part(value)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        first = f", first {value.flatten()[0].item():.8g}" if value.numel() else ""
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}{first}"
    return f"a {type(value).__name__}"
