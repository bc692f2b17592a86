"""Finds operations that need real values, and tensors passed between blocks out of band."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from plumbline.trainer.balanced.blocks import tensors_in
from plumbline.trainer.balanced.data_flow import DataFlow
from plumbline.trainer.balanced.interception import Interception
from plumbline.trainer.balanced.labels import Part
from plumbline.trainer.balanced.remote_tensor import NoValuesError, RemoteTensor


def find_obstacles(flow: DataFlow, interception: Interception, step: Callable[[], Any]) -> None:
    """Run ``step`` without values, and record in ``flow`` where it cannot be cut."""
    with interception.installed():
        try:
            with HiddenTensorUse(flow, interception) as hidden:
                outputs = interception.run(Part(flow.end, flow.end), [], step)
            hidden.use(tensors_in(outputs))
        except Exception as error:
            position, why = interception.position, f"does not run without values: {type(error).__name__}: {error}"
            if isinstance(error.__cause__, NoValuesError):
                why = str(error.__cause__)
            reason = f"{flow.after(position.call)} {why}"
            flow.forbid(position.place, flow.end, reason)


class HiddenTensorUse(TorchFunctionMode):
    """Records where a step uses a tensor that a block kept to itself, in an attribute for example."""

    def __init__(self, flow: DataFlow, interception: Interception) -> None:
        super().__init__()
        self.flow, self.interception = flow, interception

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation. Tensors made inside a skipped call are hidden in it, unless the call returns them."""
        self.use(tensors_in((args, kwargs or {})))
        outputs = func(*args, **(kwargs or {}))
        if self.interception.skipping:
            for tensor in tensors_in(outputs):
                if isinstance(tensor, RemoteTensor) and tensor.hidden_in is None:
                    tensor.hidden_in = self.interception.position.call
        return outputs

    def use(self, given: list[Tensor]) -> None:
        """Forbid cuts between where tensors are hidden and where they are used."""
        position = self.interception.position
        for tensor in given:
            hidden_in = tensor.hidden_in if isinstance(tensor, RemoteTensor) else None
            if hidden_in is not None and not (self.interception.skipping and hidden_in == position.call):
                reason = f"{self.flow.calls[hidden_in]} makes a tensor that is used later but not returned"
                self.flow.forbid(2 * hidden_in, position.place, reason)
