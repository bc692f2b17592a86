"""The effects of ``precision``, ``use_amp`` and ``amp_level`` on weights, batches, backward pass and optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer


class PrecisionPlugin:
    """O0, 32 bits: torch's defaults, some of which the subclasses override.

    ``dtype`` is the dtype of the precision; ``device_type`` is torch's, such as ``"cuda"`` or ``"cpu"``.
    """

    casts_batches = False

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        self.dtype = dtype
        self.device_type = device_type

    def convert(self, module: nn.Module) -> None:
        """Convert the weights to the precision's dtype, in place."""

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Prepare for these optimizers. All ranks already have the same weights."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a new context in which the forward pass runs."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of the optimizer's parameters, before they are clipped."""

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def stepped(self, optimizer: Optimizer) -> bool:
        """Return whether the last ``step`` changed the weights, that is, was not skipped."""
        return True

    def update(self) -> None:
        """Finish the step of all optimizers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resuming needs in addition to weights and optimizers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Converted(PrecisionPlugin):
    """O3, or 64 bits: weights, gradients and floating-point batches have the same dtype, without loss scaling."""

    casts_batches = True

    def convert(self, module: nn.Module) -> None:
        module.to(self.dtype)


class Autocast(PrecisionPlugin):
    """O1: float32 weights, with the forward pass under autocast and, for float16, loss scaling.

    Ranks need not communicate about overflows. The scaler checks gradients after the all-reduce, and a mean with an inf
    or a nan is not finite, so either all ranks find an overflow or none does.
    """

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        super().__init__(dtype, device_type)
        self.scaler = torch.amp.GradScaler(device_type, enabled=dtype is torch.float16)
        self._stepped: set[Optimizer] = set()

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda stepped, *_: self._stepped.add(stepped))

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        self._stepped.discard(optimizer)
        self.scaler.step(optimizer)

    def stepped(self, optimizer: Optimizer) -> bool:
        return optimizer in self._stepped

    def update(self) -> None:
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])


class MasterWeights(Autocast):
    """O2: 16-bit weights, except BatchNorm's, updated from float32 master weights; for float16, loss scaling."""

    casts_batches = True
    autocast = PrecisionPlugin.autocast

    def convert(self, module: nn.Module) -> None:
        for layer in module.modules():
            if not isinstance(layer, _BatchNorm):
                cast_layer: Any = layer._apply
                cast_layer(lambda t: t.to(self.dtype) if t.is_floating_point() else t, recurse=False)

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace each 16-bit weight in the optimizers with a float32 master weight."""
        super().prepare(optimizers)
        self._pairs: dict[Optimizer, list[tuple[Tensor, Tensor]]] = {}
        for optimizer in optimizers:
            pairs = self._pairs[optimizer] = []
            for group in optimizer.param_groups:
                for index, weight in enumerate(group["params"]):
                    if weight.dtype is self.dtype:
                        master = nn.Parameter(weight.detach().float(), requires_grad=weight.requires_grad)
                        if weight in optimizer.state:
                            optimizer.state[master] = optimizer.state.pop(weight)
                        group["params"][index] = master
                        pairs.append((weight, master))

    def unscale(self, optimizer: Optimizer) -> None:
        """Move the gradients to the master weights, in float32, and unscale them."""
        for weight, master in self._pairs[optimizer]:
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        super().unscale(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        super().step(optimizer)
        with torch.no_grad():
            for weight, master in self._pairs[optimizer]:
                weight.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        masters = [[master.detach() for _, master in pairs] for pairs in self._pairs.values()]
        return {**super().state_dict(), "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            for pairs, masters in zip(self._pairs.values(), state["masters"], strict=True):
                for (weight, master), saved in zip(pairs, masters, strict=True):
                    master.copy_(saved)
                    weight.copy_(saved)
