"""Decides which modules are replayed, and which only wrap a module that is."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from plumbline.recording.flat_sharding import is_fully_sharded


class Role(Enum):
    """How a call of a module is recorded."""

    UNTRAINED = "it holds no parameter that requires a gradient"
    WRAPPER = "the calls inside it are recorded"
    UNDECIDED = "what it does shows whether it or the calls inside it are recorded"
    TRACKED = "it is recorded"


def role_of(module: nn.Module) -> Role:
    """Return the role of an outermost call of ``module``, before it runs."""
    if not any(one.requires_grad for one in module.parameters()):
        return Role.UNTRAINED
    if isinstance(module, DistributedDataParallel):
        return Role.WRAPPER
    if unwrapped(module) is not module or is_fully_sharded(module):
        return Role.TRACKED
    wrapped = wrapped_in(module)
    if wrapped and {id(one) for one in module.parameters() if one.requires_grad} <= wrapped:
        return Role.WRAPPER
    if wrapped or "forward" in vars(module) or sole_child(module) is not None:
        return Role.UNDECIDED
    return Role.TRACKED


def wrapped_in(module: nn.Module) -> set[int]:
    """Return the ids of the parameters that a ``DistributedDataParallel`` inside of a module holds."""
    wrappers = (one for one in module.modules() if isinstance(one, DistributedDataParallel))
    return {id(one) for wrapper in wrappers for one in wrapper.parameters()}


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of those wrappers of torch whose inner calls cannot be observed.

    These are compiled modules, in which Python does not run, and ``DataParallel``, which calls replicas. If one of them
    contains a ``DistributedDataParallel``, that is removed as well.
    """
    inner = module
    while True:
        child = getattr(inner, "_orig_mod", None)  # torch._dynamo.eval_frame.OptimizedModule
        if child is None and isinstance(inner, DataParallel):
            child = inner.module
        if child is None and inner is not module and isinstance(inner, DistributedDataParallel):
            child = inner.module
        if not isinstance(child, nn.Module):
            return inner
        inner = child


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile was applied to a module or to a part of it, in any of the ways that torch has."""
    return any(map(is_compiled_itself, module.modules()))


def is_compiled_itself(module: nn.Module) -> bool:
    """Return whether torch.compile was applied to a module, in any of the ways that torch has."""
    return (
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def sole_child(module: nn.Module) -> nn.Module | None:
    """Return the child with a forward that holds all trainable parameters of ``module``, None if there is none."""
    if any(one is not None and one.requires_grad for one in module._parameters.values()):
        return None
    holding = [child for child in module.children() if any(one.requires_grad for one in child.parameters())]
    if len(holding) != 1 or not has_forward(holding[0]):
        return None
    return holding[0]


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called: containers such as ``ModuleList`` cannot."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_redirected(module: nn.Module, before: Any) -> bool:
    """Return whether a call replaced the instance's own ``forward``, which was ``before`` when the call began.

    A trainer sets such a ``forward`` for one call, to route another method through a wrapper.
    """
    return before is not None and vars(module).get("forward") is not before
