"""How many bytes of state an optimizer keeps for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from harness.trainer.balanced.blocks import bytes_of, tensors_in


def optimizer_state_bytes(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, int]:
    """Return the bytes of optimizer state of each parameter, by its name.

    A copy of the optimizer, without state, steps one parameter after the other on the meta device, where nothing is
    allocated. An optimizer that cannot do this steps a copy of the parameter, with a gradient of zeros.
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
    for device in (torch.device("meta"), parameter.device):
        copied = object.__new__(type(optimizer))
        copied.__dict__.update(optimizer.__dict__)
        values = torch.empty_like(parameter, device=device) if device.type == "meta" else parameter.detach().clone()
        values.requires_grad_().grad = torch.zeros_like(values)
        copied.state = type(optimizer.state)(dict)
        copied.param_groups = [{**group, "params": [values]}]
        # Hooks, and a step that a scheduler has wrapped, are those of the original.
        copied._optimizer_step_pre_hooks = type(optimizer._optimizer_step_pre_hooks)()
        copied._optimizer_step_post_hooks = type(optimizer._optimizer_step_post_hooks)()
        copied.__dict__.pop("step", None)
        try:
            copied.step()
        except (RuntimeError, NotImplementedError):
            if device.type != "meta":
                raise
            continue
        return sum(bytes_of(tensor) for tensor in tensors_in(list(copied.state.values())))
    return 0


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Keep the hooks that watch every optimizer of this process from a step that is none of the training."""
    every: list[Any] = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    kept = [dict(hooks) for hooks in every]
    for hooks in every:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(every, kept, strict=True):
            hooks.update(own)
