"""The parameters of an optimizer, in the order that numbers them."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters in the order of its groups, which numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
