"""What a GradScaler does with an optimizer: it scales its gradients, and skips its step where they are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.recording.patching import wrap_overrides
from plumbline.recording.pause import is_paused

AroundStep = Callable[[Any, Optimizer, Callable[[], Any]], Any]
"""Takes a scaler, an optimizer and the scaler's step, which may skip the optimizer's; returns what the step returns."""


def follow_scaled_steps(around: AroundStep) -> None:
    """Call ``around`` in place of each step of an enabled GradScaler, or of a subclass, for the process's life.

    A step that calls its base class's is followed once, and none is while ``paused``.
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
    """Return the factor in the gradients with which an optimizer steps: a fused one's kernel unscales them."""
    return float(getattr(optimizer, "grad_scale", None) or 1.0)


def skips_in_its_kernel(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer's step changes nothing, because its scaler found an infinite gradient.

    See ``_step_supports_amp_scaling`` in torch.amp.GradScaler.step.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found)
