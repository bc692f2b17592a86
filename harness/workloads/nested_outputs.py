"""Outputs that are no tensor: a dict with nested tuples and a scalar among them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch
from harness.workloads.mlp import Mlp


class _Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.aside = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 3)

    def forward(self, batch: Batch) -> dict[str, Any]:
        hidden = self.trunk(batch["x"]).tanh()
        length = self.trunk.weight.square().mean()
        return {"logits": self.head(hidden), "rest": (hidden, (self.aside(hidden), length))}


class NestedOutputs(Mlp):
    """The perceptron with a second head and a penalty on its weights, which the model returns as a 0-d tensor.

    Gathered from several devices the penalty is a vector with an entry a device, of which the loss takes the mean.
    """

    name = "nested-outputs"
    exposes = "outputs gathered in part, without a gradient, or in another order; scalars that get lost or are summed"
    needs: ClassVar[frozenset[str]] = frozenset({"nested-outputs"})
    narrow = True

    def build(self) -> nn.Module:
        """Return a trunk with two heads; outputs are ``{"logits", "rest": (hidden, (aside, length))}``."""
        return _Several()

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the cross entropy, and a penalty for what else the model returned."""
        hidden, (aside, length) = outputs["rest"]
        # Losses that autocast takes in float32: in float16 the scaled gradient of a plain mean is out of range.
        small = sum(nn.functional.mse_loss(output, torch.zeros_like(output)) for output in (hidden, aside))
        return nn.functional.cross_entropy(outputs["logits"], batch["y"]) + 0.1 * small + 0.5 * length.mean()
