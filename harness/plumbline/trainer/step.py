"""The user's training or validation step as a module, which DataParallel and DistributedDataParallel can wrap."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.module import Module
from plumbline.trainer.nested import batch_length, cast
from plumbline.trainer.precision_plugins import PrecisionPlugin


class StepModule(nn.Module):
    """Runs a step of the user's module in the trainer's precision.

    DataParallel runs this forward in threads, which do not inherit autocast. Autocast is therefore entered here.
    """

    def __init__(self, module: Module, precision: PrecisionPlugin) -> None:
        super().__init__()
        self.module = module
        self.precision = precision
        self.ends = ends_itself(module)

    def forward(self, hook: str, batch: Any, *indices: int) -> Any:
        """Return the result of the method ``hook``: a loss, outputs for ``training_step_end``, or weighted metrics."""
        if self.precision.casts_batches:
            batch = cast(batch, self.precision.dtype)
        with self.precision.autocast():
            outputs = getattr(self.module, hook)(batch, *indices)
        if hook == "validation_step":
            return weighted(outputs, batch_length(batch) or 1, self.precision.device_type)
        return outputs if self.ends else scalar_loss(outputs)


def ends_itself(module: Module) -> bool:
    return type(module).training_step_end is not Module.training_step_end


def scalar_loss(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
    raise MisconfigurationError(
        f"The loss is {found}, not a scalar tensor: return loss.mean(), or a dict with it as 'loss', from "
        "training_step (or from training_step_end, if there is one)."
    )


def loss_function(module: Module, precision: PrecisionPlugin, splits: bool) -> Callable[[Any, Any], Tensor]:
    """Return a function that computes the loss from a training step's gathered outputs and the whole batch."""
    if not ends_itself(module):
        return lambda outputs, batch: outputs.mean() if splits else outputs
    takes_batch = end_takes_batch(module)

    def loss(outputs: Any, batch: Any) -> Tensor:
        if takes_batch and precision.casts_batches:
            batch = cast(batch, precision.dtype)
        with precision.autocast():
            return scalar_loss(module.training_step_end(outputs, *(batch,) * takes_batch))

    return loss


def end_takes_batch(module: Module) -> bool:
    """Return whether the user's ``training_step_end`` has a second argument, for the whole batch."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.training_step_end).parameters.values()
    return sum(parameter.kind in positional for parameter in parameters) > 1


def weighted(metrics: Any, samples: int, device_type: str) -> dict[str, Tensor]:
    """Return each metric as ``[[value × samples, samples]]``, a row that is summed over replicas and batches."""
    named = metrics if isinstance(metrics, dict) else {"val_loss": metrics}
    rows = {}
    for name, value in named.items():
        value = torch.as_tensor(value, device=device_type).detach().double().mean() * samples
        rows[name] = torch.stack([value, value.new_tensor(samples)])[None]
    return rows
