"""Forward, loss and backward of a workload on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plumbline.core.errors import WorkloadError
from plumbline.own_workloads.load import calling
from plumbline.workloads import Batch, Workload


def forward_of(model: nn.Module, batch: Batch) -> Any:
    with calling("forward(batch)"):
        return model(batch)


def loss_of(workload: Workload, outputs: Any, batch: Batch) -> Tensor:
    """Return the loss.

    Raises:
        WorkloadError: it is not a finite scalar tensor.
    """
    with calling("loss(outputs, batch)"):
        loss: Any = workload.loss(outputs, batch)
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise WorkloadError(f"loss(outputs, batch) returned {what}: return a scalar tensor, for example with .mean()")
    if not bool(loss.isfinite()):
        raise WorkloadError(f"loss(outputs, batch) is {float(loss.detach())} at the initial weights")
    return loss


def pass_of(workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(workload, forward_of(model, batch), batch)


class TrainingPass:
    """A model of ``workload`` in training mode, at its initial weights."""

    def __init__(self, workload: Workload, dtype: torch.dtype) -> None:
        self._workload = workload
        self.model = workload.model(dtype).train()

    def gradient(self, batch: Batch) -> dict[str, Tensor]:
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        loss = pass_of(self._workload, self.model, batch)
        with calling("backward"):
            gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        return {name: value for name, value in zip(trained, gradients, strict=True) if value is not None}


class NoNarrowing(TorchFunctionMode):
    """Refuses operations that turn float64 that depends on a parameter into a narrower type.

    Its gradient would be rounded as in float32, and the oracle would be no better than the trainer.
    """

    def __torch_function__(
        self, operation: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if (
            isinstance(result, Tensor)
            and result.is_floating_point()
            and result.dtype is not torch.float64
            and any(
                isinstance(given, Tensor) and given.dtype is torch.float64 and given.requires_grad
                for given in tree_leaves((args, kwargs))
            )
        ):
            name = getattr(operation, "__name__", str(operation))
            raise WorkloadError(
                f"{name}() converts float64 to {str(result.dtype).removeprefix('torch.')}: to avoid computing in 16 "
                "bits, cast with x.to(torch.promote_types(x.dtype, torch.float32))"
            )
        return result
