"""Synchronises stages and replicas: gradients of shared weights, gradient norms, overflows, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from plumbline.trainer.balanced.pipeline import Place


class SharedWeights:
    """Sums the gradients of weights that several stages hold, such as tied weights, over these stages.

    ``holders`` maps the names of these weights to their stages, and is the same on all ranks. Waiting times out after
    ``limit`` seconds.
    """

    def __init__(
        self, holders: dict[str, tuple[int, ...]], weights: dict[str, nn.Parameter], place: Place, limit: float
    ) -> None:
        self.groups: list[tuple[Any, list[nn.Parameter]]] = []
        for stages in sorted(set(holders.values())):
            pipelines = range(0, dist.get_world_size(), place.count)
            group = own_group([[first + stage for stage in stages] for first in pipelines], limit)
            if place.number in stages:
                self.groups.append((group, [weights[name] for name in sorted(holders) if holders[name] == stages]))

    def add_gradients(self, own: Sequence[Tensor]) -> None:
        mine = {id(weight) for weight in own}
        for group, weights in self.groups:
            sum_gradients([weight for weight in weights if id(weight) in mine], group)


def sum_gradients(weights: Sequence[Tensor], group: Any) -> None:
    """Sum the gradients of weights over a group. A gradient of None counts as zero; if all are None, it stays None."""
    if not weights:
        return
    found = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32)
    found = found.to(weights[0].device)
    dist.all_reduce(found, group=group)
    sums = []
    for weight, count in zip(weights, found.tolist(), strict=True):
        if count:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = gradient.to_dense() if gradient.is_sparse else gradient.contiguous()
            sums.append(dist.all_reduce(weight.grad, group=group, async_op=True))
    for pending in sums:
        pending.wait()


def own_group(members: Sequence[Sequence[int]], limit: float, backend: str | None = None) -> Any:
    """Create a group for each list of ranks, with a timeout of ``limit`` seconds, and return this rank's group.

    All ranks must call this.
    """
    groups = [dist.new_group(list(ranks), timedelta(seconds=limit), backend) for ranks in members]
    return next((group for ranks, group in zip(members, groups, strict=True) if dist.get_rank() in ranks), None)


def clip_over_stages(parameters: Sequence[Tensor], counted: Sequence[bool], largest: float, group: Any = None) -> None:
    """Scale gradients so that their 2-norm over all stages is at most ``largest``, as ``clip_grad_norm_`` does.

    ``counted`` says which parameters' norms this stage contributes, because a weight on several stages counts once.
    ``group`` has one rank of each stage; None: all ranks.
    """
    gradients = [(p.grad, count) for p, count in zip(parameters, counted, strict=True) if p.grad is not None]
    device = parameters[0].device if parameters else torch.device("cpu")
    squares = [torch.linalg.vector_norm(dense(grad)).double() ** 2 for grad, count in gradients if count]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    factor = torch.clamp(largest / (total.sqrt() + 1e-6), max=1.0)  # clip_grad_norm_ also adds 1e-6
    for gradient, _ in gradients:
        gradient.mul_(factor.to(gradient.dtype))


def dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class Beacon:
    """Informs each stage's GradScaler about overflows on other stages, by an extra parameter in each optimizer.

    A GradScaler checks only its own process's gradients. The gradient of the extra parameter, the beacon, is infinite
    if a gradient is not finite on any stage, and zero otherwise.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parameters: dict[Optimizer, nn.Parameter] = {}

    def add_to(self, optimizer: Optimizer) -> None:
        beacon = self.parameters[optimizer] = nn.Parameter(torch.zeros((), device=self.device))
        optimizer.param_groups[-1]["params"].append(beacon)

    def light(self, optimizer: Optimizer, weights: Sequence[Tensor]) -> None:
        """Set the beacon's gradient: zero if the gradients of these weights are finite on all stages, else infinite."""
        finite = [torch.isfinite(dense(weight.grad)).all() for weight in weights if weight.grad is not None]
        found = (~torch.stack(finite).all()).float() if finite else torch.zeros((), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self.parameters[optimizer].grad = torch.where(found > 0, torch.inf, 0.0).to(self.device)


@dataclass(frozen=True)
class StageReplicas:
    """The process groups of a rank: its ``pipeline``, and the ``replicas`` of its stage, None if there are none.

    ``control`` is the pipeline's gloo group.
    """

    place: Place
    control: Any
    pipeline: Any
    replicas: Any

    @classmethod
    def meet(cls, place: Place, control: Any, limit: float) -> StageReplicas:
        """Create the groups with a timeout of ``limit`` seconds. All ranks must call this.

        ``control`` is a gloo group of all ranks.
        """
        if place.replicas == 1:
            return cls(place, control, None, None)
        ranks = range(place.count * place.replicas)
        pipelines = [ranks[first : first + place.count] for first in ranks[:: place.count]]
        stages = [ranks[stage :: place.count] for stage in range(place.count)]
        return cls(place, own_group(pipelines, limit, "gloo"), own_group(pipelines, limit), own_group(stages, limit))

    def sum_gradients(self, weights: Sequence[Tensor]) -> None:
        if self.replicas is not None:
            sum_gradients(weights, self.replicas)

    def share_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Broadcast the first replica's buffers, as DDP does before a forward."""
        if self.replicas is not None:
            for buffer in buffers:
                dist.broadcast(buffer, self.place.number, self.replicas)
