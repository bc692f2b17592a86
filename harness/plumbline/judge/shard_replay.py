"""Replays optimizer steps in which each rank treats its block of every parameter as a whole parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from plumbline.evidence.trace import RankTrace, Step, Tensors
from plumbline.judge.oracle.noise import distance, in_noise, limit
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.judge.update_replay import StepReplays, replays

WAYS = (torch.chunk, torch.tensor_split)
"""The ways to divide a parameter into blocks: as FSDP2 and DTensor do, and as evenly as possible."""


def stepped_shard_by_shard(trace: RankTrace, analysis: TraceAnalysis) -> bool:
    """Say whether steps of the optimizer on separate blocks explain every update, and steps on whole parameters do not.

    At every step, each parameter must match the update by blocks within the rounding of one device, which does not sum
    matrix products in parts. For at least one parameter, the update by blocks must differ from that of the whole.
    """
    sizes = {len(group) for group in analysis.cell.contract.holders(analysis.cell.topology)} - {1}
    ways = [(way, dim, size) for way in WAYS for dim in (0, 1) for size in sizes]
    steps = list(replays(trace, analysis, (None, analysis.cell.arithmetic), (None, None))) if ways else []
    return any(_fits(steps, analysis, _Blocks(analysis, way, dim, size)) for way, dim, size in ways)


def _fits(steps: Sequence[StepReplays], analysis: TraceAnalysis, blocks: _Blocks) -> bool:
    differs = False
    for step in steps:
        exact, replayed = step.weights
        alone = blocks.after(step.recorded)
        for name, value in step.recorded.after.items():
            if name in exact:
                noise = max(step.unit(name, analysis), distance(replayed[name], exact[name]))
                if in_noise(distance(value, alone[name]), noise) > limit():
                    return False
                differs |= in_noise(distance(alone[name], exact[name]), noise) > limit()
    return differs


class _Blocks:
    """One optimizer per rank, which steps the rank's block of every parameter, in the precision of the weights."""

    def __init__(self, analysis: TraceAnalysis, way: object, dim: int, size: int) -> None:
        self._way, self._dim, self._size = way, dim, size
        stepped: torch.dtype = getattr(torch, analysis.cell.arithmetic.stepped)
        self._whole = {name: value.to(stepped).clone() for name, value in analysis.start.items()}
        split = {name: self._split(value) for name, value in self._whole.items()}
        self._parts = [{n: nn.Parameter(blocks[r]) for n, blocks in split.items() if r < len(blocks)}
                       for r in range(size)]  # fmt: skip
        self._optimizers = [analysis.workload.optimizers(list(part.values())) for part in self._parts if part]

    def after(self, step: Step) -> Tensors:
        """Return the weights after a step."""
        with torch.no_grad():
            for rank, name, block in self._each():
                block.copy_(self._split(step.before[name])[rank])
                gradient = step.gradients.get(name)
                block.grad = None if gradient is None else self._split(gradient.to(block.dtype))[rank].clone()
        for optimizers in self._optimizers:
            rates = iter(step.learning_rates)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = next(rates, group["lr"])
            for optimizer in optimizers:
                optimizer.step()
        return {name: value.double() for name, value in self._whole.items()}

    def _each(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        for rank, part in enumerate(self._parts):
            for name, block in part.items():
                yield rank, name, block

    def _split(self, value: Tensor) -> Sequence[Tensor]:
        if value.dim() <= self._dim:
            return (value,)
        blocks: Sequence[Tensor] = self._way(value, self._size, self._dim)  # type: ignore[operator]
        return blocks
