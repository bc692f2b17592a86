"""Follows GradScalers, which scale the gradients of an optimizer, and skip its step if they are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.recording.patching import wrap_overrides
from plumbline.recording.pause import is_paused

AroundStep = Callable[[Any, Optimizer, Callable[[], Any]], Any]
"""Called with a scaler, an optimizer and the scaler's step, which may skip the optimizer's; returns the step's
result."""


def follow_scaled_steps(around: AroundStep) -> None:
    """Call ``around`` in place of each step of an enabled GradScaler, or of a subclass, until patches are removed.

    A step that calls the step of its base class is followed once. No step is followed while ``paused``.
    """
    running = False

    def followed(original: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal running
        if running or is_paused() or not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        running = True
        try:
            return around(scaler, optimizer, lambda: original(scaler, optimizer, *args, **kwargs))
        finally:
            running = False

    wrap_overrides(torch.amp.GradScaler, "step", followed)


def scale_left(optimizer: Optimizer) -> float:
    """Return the scale that is left in the gradients of a step: the kernel of a fused optimizer unscales them."""
    return float(getattr(optimizer, "grad_scale", None) or 1.0)


def skips_in_its_kernel(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer's step changes nothing, because its scaler found an infinite gradient.

    See ``_step_supports_amp_scaling`` in torch.amp.GradScaler.step.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found)
