"""One forward, loss and backward of a workload on one device, in the user's code, whose errors become sentences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.core.errors import WorkloadError
from harness.own_workloads.attempt import attempt
from harness.workloads import Batch, Workload


def forward_of(model: nn.Module, batch: Batch) -> Any:
    """Return the model's outputs for ``batch``."""
    with attempt("forward(batch)"):
        return model(batch)


def loss_of(workload: Workload, outputs: Any, batch: Batch) -> Tensor:
    """Return the loss.

    Raises:
        WorkloadError: it is no finite scalar tensor.
    """
    with attempt("loss(outputs, batch)"):
        loss: Any = workload.loss(outputs, batch)
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise WorkloadError(f"loss(outputs, batch) returns {what}: it must be a scalar tensor, as .mean() makes it")
    if not bool(loss.isfinite()):
        raise WorkloadError(f"loss(outputs, batch) is {float(loss)} at the initial weights")
    return loss


def pass_of(workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of ``batch``."""
    return loss_of(workload, forward_of(model, batch), batch)


class Pass:
    """A model of ``workload`` in training mode, at its initial weights."""

    def __init__(self, workload: Workload, dtype: torch.dtype) -> None:
        self._workload = workload
        self.model = workload.model(dtype).train()

    def gradient(self, batch: Batch) -> dict[str, Tensor]:
        """Return the gradient of each parameter that the loss of ``batch`` depends on."""
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        loss = pass_of(self._workload, self.model, batch)
        with attempt("backward"):
            gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        return {name: value for name, value in zip(trained, gradients, strict=True) if value is not None}
