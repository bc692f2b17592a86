"""What ``precision``, ``use_amp`` and ``amp_level`` do to weights, batches, backward pass and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer


class PrecisionPlugin:
    """O0, 32 bits: what torch does by itself. The other classes change a part of this.

    Args:
        dtype: The dtype that the class is about.
        device_type: ``"cuda"`` or ``"cpu"``.

    """

    casts_batches = False

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        self.dtype = dtype
        self.device_type = device_type

    def convert(self, module: nn.Module) -> None:
        """Bring the weights into their dtype, in place."""

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Get ready for these optimizers; the weights are those that all ranks agree on."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a new context in which the forward pass runs."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Make the gradients of the optimizer's own parameters the true ones, before they are clipped."""

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights."""
        optimizer.step()

    def stepped(self, optimizer: Optimizer) -> bool:
        """Return whether the last ``step`` changed weights, or was skipped."""
        return True

    def update(self) -> None:
        """End a step of all optimizers."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs beyond weights and optimizers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over ``state_dict`` of the same class."""


class Converted(PrecisionPlugin):
    """O3, or 64 bits: weights, gradients and floating batches have one dtype; nothing is scaled."""

    casts_batches = True

    def convert(self, module: nn.Module) -> None:
        """Convert all floating parameters and buffers."""
        module.to(self.dtype)


class Autocast(PrecisionPlugin):
    """O1: float32 weights, the forward pass under autocast; float16 has its loss scaled.

    Ranks need not agree on found infs: the scaler looks at gradients after the all-reduce, and the mean of
    anything with an inf or a nan is not finite, so all of them find it or none does.
    """

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        super().__init__(dtype, device_type)
        self.scaler = torch.amp.GradScaler(device_type, enabled=dtype is torch.float16)
        self._stepped: set[Optimizer] = set()

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Notice from the optimizers themselves whether they step: the scaler does not tell."""
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda stepped, *_: self._stepped.add(stepped))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return torch's autocast; a new one each time, as replicas enter it from threads of their own."""
        return torch.autocast(self.device_type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Differentiate the scaled loss."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step unless a gradient is not finite."""
        self._stepped.discard(optimizer)
        self.scaler.step(optimizer)

    def stepped(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer has stepped."""
        return optimizer in self._stepped

    def update(self) -> None:
        """Adapt the scale, once for all optimizers."""
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scaler's state."""
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])


class MasterWeights(Autocast):
    """O2: half weights except BatchNorm's, stepped through float32 masters; float16 has its loss scaled."""

    casts_batches = True
    autocast = PrecisionPlugin.autocast

    def convert(self, module: nn.Module) -> None:
        """Convert all floating parameters and buffers outside BatchNorm layers."""
        for layer in module.modules():
            if not isinstance(layer, _BatchNorm):
                cast_layer: Any = layer._apply
                cast_layer(lambda t: t.to(self.dtype) if t.is_floating_point() else t, recurse=False)

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Put a float32 master in the place of each half weight in the optimizers."""
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
        """Move the weights' gradients to the masters, in float32, and unscale them there."""
        for weight, master in self._pairs[optimizer]:
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        super().unscale(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step the masters and round them into the weights."""
        super().step(optimizer)
        with torch.no_grad():
            for weight, master in self._pairs[optimizer]:
                weight.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state and the masters."""
        masters = [[master.detach() for _, master in pairs] for pairs in self._pairs.values()]
        return {**super().state_dict(), "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scaler's state, the masters and with them the weights."""
        super().load_state_dict(state)
        with torch.no_grad():
            for pairs, masters in zip(self._pairs.values(), state["masters"], strict=True):
                for (weight, master), saved in zip(pairs, masters, strict=True):
                    master.copy_(saved)
                    weight.copy_(saved)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return nested dicts, lists and tuples with ``function`` applied to their tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)((key, map_tensors(function, item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating tensors in ``dtype``."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)
