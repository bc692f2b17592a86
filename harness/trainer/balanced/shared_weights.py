"""Weights that several stages hold, and what all stages must agree on before a step: gradients, norms, infinities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class SharedWeights:
    """Adds the gradients of weights that several stages hold, as tied ones, over these stages.

    Args:
        holders: For each weight of the module that more than one stage holds, these stages, by name; the same on all
            ranks.
        weights: The module's weights by name.
        stage: This rank's.

    """

    def __init__(self, holders: dict[str, tuple[int, ...]], weights: dict[str, nn.Parameter], stage: int) -> None:
        self.groups: list[tuple[Any, list[nn.Parameter]]] = []
        for stages in sorted(set(holders.values())):
            group = dist.new_group(list(stages))  # all ranks must make it
            if stage in stages:
                self.groups.append((group, [weights[name] for name in sorted(holders) if holders[name] == stages]))

    def add_gradients(self, own: Sequence[Tensor]) -> None:
        """Replace the gradients of those of these weights that are shared by their sum; None counts as zero.

        Where none of the stages has a gradient, it stays None.
        """
        mine = {id(weight) for weight in own}
        for group, weights in self.groups:
            chosen = [weight for weight in weights if id(weight) in mine]
            if not chosen:
                continue
            found = torch.tensor([weight.grad is not None for weight in chosen], dtype=torch.int32)
            found = found.to(chosen[0].device)
            dist.all_reduce(found, group=group)
            for weight, count in zip(chosen, found.tolist(), strict=True):
                if count:
                    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                    gradient = gradient.to_dense() if gradient.is_sparse else gradient.contiguous()
                    dist.all_reduce(gradient, group=group)
                    weight.grad = gradient


def clip_over_stages(parameters: Sequence[Tensor], counted: Sequence[bool], largest: float) -> None:
    """Scale gradients so that their 2-norm over all stages is ``largest`` at most, as ``clip_grad_norm_`` does.

    ``counted`` says which parameters' norms this stage adds: a weight on several stages counts once.
    """
    gradients = [(p.grad, count) for p, count in zip(parameters, counted, strict=True) if p.grad is not None]
    device = parameters[0].device if parameters else torch.device("cpu")
    squares = [torch.linalg.vector_norm(dense(grad)).double() ** 2 for grad, count in gradients if count]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    factor = torch.clamp(largest / (total.sqrt() + 1e-6), max=1.0)  # 1e-6 is that of clip_grad_norm_
    for gradient, _ in gradients:
        gradient.mul_(factor.to(gradient.dtype))


def dense(gradient: Tensor) -> Tensor:
    """Return the values of a gradient that may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class Beacon:
    """Tells each stage's GradScaler of infinities on other stages, by a parameter that has no other purpose.

    The scaler looks at the gradients of this process only. The beacon, in each optimizer, gets an infinite gradient
    where any stage has found one, and else zero.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parameters: dict[Optimizer, nn.Parameter] = {}

    def add_to(self, optimizer: Optimizer) -> None:
        """Put a beacon at the end of the optimizer's last group."""
        beacon = self.parameters[optimizer] = nn.Parameter(torch.zeros((), device=self.device))
        optimizer.param_groups[-1]["params"].append(beacon)

    def light(self, optimizer: Optimizer, weights: Sequence[Tensor]) -> None:
        """Find whether the gradients of these weights are finite on all stages, and set the beacon's accordingly."""
        finite = [torch.isfinite(dense(weight.grad)).all() for weight in weights if weight.grad is not None]
        found = (~torch.stack(finite).all()).float() if finite else torch.zeros((), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self.parameters[optimizer].grad = torch.where(found > 0, torch.inf, 0.0).to(self.device)
