"""Measures optimizers: the bytes of state for each parameter, and the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from plumbline.trainer.balanced.blocks import bytes_of
from plumbline.trainer.nested import tensors_in


def optimizer_state_bytes(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, int]:
    """Return the bytes of optimizer state of each parameter, by its name.

    A copy of the optimizer, without state, steps one parameter after the other on the meta device, where nothing is
    allocated. An optimizer that cannot do this steps a copy of the parameter, with zeros as its gradient, dense or
    sparse.
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

    ``copies`` has tensors by the ``id`` of the parameters that they stand for. Those without gradients are left out;
    none is changed. Returns nothing if there is nothing to step, or no memory for another copy.
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
    except torch.cuda.OutOfMemoryError:
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
    # Hooks, and a step that a scheduler has wrapped, are those of the original.
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
