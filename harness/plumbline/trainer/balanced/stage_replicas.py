"""Replicas of a pipeline: their ranks, and what the replicas of a stage exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from plumbline.trainer.balanced.pipeline import Place
from plumbline.trainer.balanced.shared_weights import own_group, sum_gradients


@dataclass(frozen=True)
class StageReplicas:
    """The process groups of a rank: its pipeline, and the replicas of its stage; None without replicas.

    ``control`` is the gloo group of the pipeline.
    """

    place: Place
    control: Any
    pipeline: Any
    replicas: Any

    @classmethod
    def meet(cls, place: Place, control: Any, limit: float) -> StageReplicas:
        """Make the groups with a timeout of ``limit`` seconds; all ranks must call this.

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
