"""Notes what a GradScaler does: the scale of each backward pass, infinities, and steps that it skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.optimizer.twin import is_finite
from plumbline.check.rank.tensor_digest import weights_prints
from plumbline.recording.grad_scaler import follow_scaled_steps, skips_in_its_kernel
from plumbline.recording.observer import WrappingObserver
from plumbline.recording.parameters import parameters_of
from plumbline.recording.patching import wrap_overrides


class LossScale(WrappingObserver):
    """Wraps GradScaler and all of its subclasses.

    ``scale`` is the loss scale of the current or last backward pass: 1 if no scaler scaled its loss. ``on_unscaling``
    is called with an optimizer before a scaler unscales its gradients, ``on_skipped`` when a scaler has skipped its
    step.

    Facts of a step: ``scaled``: whether a scaler took it; ``scale``: the loss scale at that time. ``found``: on how
    many devices the scaler found gradients with an infinity or a NaN. ``bad``: how many parameters have gradients that
    are not finite. ``broken``: how many parameters were finite before the step, and are not after it. ``moved``: how
    many parameters, and how many tensors of the optimizer's state, a skipped step changed.
    Facts of a backward pass: ``scale``.
    """

    name = "loss-scale"

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.on_skipped: Callable[[Optimizer], None] = lambda optimizer: None
        self.on_unscaling: Callable[[Optimizer], None] = lambda optimizer: None
        self._unscaled: WeakSet[Optimizer] = WeakSet()
        self._stepping: Optimizer | None = None
        self._stepped = False
        self._scaled: Facts = {}
        self._before: dict[str, int] = {}
        self._finite: list[bool] = []

    def install(self) -> None:
        wrap_overrides(torch.amp.GradScaler, "scale", self._around_scale)
        wrap_overrides(torch.amp.GradScaler, "unscale_", self._around_unscale)
        wrap_overrides(torch.amp.GradScaler, "update", self._around_update)
        follow_scaled_steps(self._around_step)

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Assume the scale 1. If the loss is scaled, its hook sets the scale when the pass reaches it."""
        self.scale = 1.0

    def backward_ends(self, number: int) -> Facts | None:
        return {"scale": self.scale}

    def before_step(self, optimizer: Optimizer) -> None:
        """If some gradients are not finite, note which parameters are."""
        if self._stepping is not None:  # either a wrapper or the optimizer inside it
            self._stepping, self._stepped = optimizer, True
        bad = _bad(optimizer)
        self._finite = [is_finite(parameter) for parameter in parameters_of(optimizer)] if bad else []

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        parameters = parameters_of(optimizer)
        facts: Facts = {"scaled": self._stepping is optimizer, "bad": _bad(optimizer)}
        if facts["scaled"]:
            facts |= self._scaled
            facts["found"] = facts.get("found", 0) or int(skips_in_its_kernel(optimizer))
        if skipped:
            facts["moved"] = _moved(self._before, _prints(optimizer))
        elif self._finite:
            now = [is_finite(parameter) for parameter in parameters]
            facts["broken"] = sum(old and not new for old, new in zip(self._finite, now, strict=False))
        self._finite = []
        self._unscaled.discard(optimizer)
        return facts

    def pending_scale(self, optimizer: Optimizer) -> float:
        """Return the loss scale that is still in the gradients of an optimizer: 1 once they are unscaled."""
        return 1.0 if optimizer in self._unscaled else self.scale

    def _around_scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if self.attends and scaler.is_enabled():
            with self.notes():
                factor = float(scaler.get_scale())
                for one in (scaled,) if isinstance(scaled, Tensor) else tuple(scaled):
                    if isinstance(one, Tensor) and one.requires_grad:
                        one.register_hook(lambda _, factor=factor: self._reached(factor))  # type: ignore[no-untyped-call]
        return scaled

    def _reached(self, factor: float) -> None:
        self.scale = factor

    def _around_unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Optimizer) -> Any:
        if self.attends and scaler.is_enabled():
            with self.notes():
                self.on_unscaling(_innermost(optimizer))
        result = original(scaler, optimizer)
        if self.attends and scaler.is_enabled():
            with self.notes():
                self._unscaled.add(_innermost(optimizer))
        return result

    def _around_update(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._unscaled.clear()
        return original(scaler, *args, **kwargs)

    def _around_step(self, scaler: Any, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        if not self.recording:
            return step()
        inner = _innermost(optimizer)
        with self.notes():
            self._stepping, self._stepped = inner, False
            self._scaled = {"scale": float(scaler.get_scale())}
            self._before = _prints(inner)
        try:
            result = step()
            with self.notes():
                self._look_for_skip(scaler, optimizer, inner)
        finally:
            self._stepping = None
        return result

    def _look_for_skip(self, scaler: Any, given: Optimizer, optimizer: Optimizer) -> None:
        """Report a step if the scaler skipped it, but not if it was taken without being observed."""
        state = scaler._per_optimizer_states[id(given)]
        found = int(sum(float(one) for one in state["found_inf_per_device"].values()))
        if self._stepped or not (found or _prints(optimizer) == self._before):
            return
        self._scaled["found"] = found
        self.on_skipped(optimizer)


def _innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer of torch inside wrappers that hold it as ``optimizer``, such as Accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, Optimizer)
    return optimizer


def _prints(optimizer: Optimizer) -> dict[str, int]:
    named: dict[str, Tensor] = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        named[f"weights {number}"] = parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                named[f"state {number} {key}"] = value
    return dict(zip(named, weights_prints(list(named.values())), strict=True))


def _moved(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return how many weights and how many tensors of the state changed. New state does not count."""
    changed = [name for name, value in before.items() if after.get(name, value) != value]
    weights = sum(name.startswith("weights") for name in changed)
    return {"weights": weights, "state": len(changed) - weights}


def _bad(optimizer: Optimizer) -> int:
    gradients = (parameter.grad for parameter in parameters_of(optimizer))
    return sum(gradient is not None and not is_finite(gradient) for gradient in gradients)
