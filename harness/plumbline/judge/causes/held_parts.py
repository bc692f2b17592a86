"""What each rank holds of a shared model: blocks of tensors, whole tensors, and its own experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plumbline.evidence.trace import Block, Step, Tensors, block_index
from plumbline.judge.causes.oracle_gradient_case import OracleGradientCase
from plumbline.judge.oracle.noise import distance


@dataclass(frozen=True, eq=False)
class HeldParts:
    """The ranks that hold a model together with the one of a case, and what each of them holds."""

    case: OracleGradientCase

    @cached_property
    def members(self) -> dict[int, Step]:
        """What each rank that sees the samples of the case recorded, by rank."""
        return self.case.counterfactuals.analysis.recorded_together(self.case.index, self.case.rank)

    @cached_property
    def first(self) -> int:
        """The first of them, which is the one judged."""
        return next(iter(self.members))

    @cached_property
    def siblings(self) -> tuple[int, ...]:
        """The ranks whose blocks make up whole tensors, so that their norms add up to the whole gradient's."""
        cell = self.case.counterfactuals.cell
        return next(group for group in cell.contract.norm_groups(cell.topology) if self.first in group)

    @cached_property
    def blocks(self) -> dict[int, dict[str, Block]]:
        """Each sibling's blocks by the parameter's name, where it does not hold the whole tensor."""
        recorded = self.case.counterfactuals.analysis.recorded.ranks
        return {rank: recorded[rank].blocks for rank in self.siblings}

    def blocks_of(self, name: str) -> dict[int, tuple[slice, ...]]:
        """Return the index of each sibling's block of a tensor, by rank; empty if siblings hold it whole.

        If several siblings have the same block, the first one counts.
        """
        indices: dict[int, tuple[slice, ...]] = {}
        for rank, own in self.blocks.items():
            if name in own and (index := block_index(own[name])) not in indices.values():
                indices[rank] = index
        return indices

    @property
    def in_blocks(self) -> bool:
        return any(self.blocks.values())

    def on(self, rank: int, gradient: Tensors) -> Tensors:
        """Return what a sibling holds of a gradient; whole tensors are the first rank's."""
        indices = {name: self.blocks_of(name) for name in gradient}
        own = {name: gradient[name][index[rank]] for name, index in indices.items() if rank in index}
        whole = {name: gradient[name] for name, index in indices.items() if not index}
        return {**own, **whole} if rank == self.first else own

    def assembled(self, parts: dict[int, Tensors], like: Tensors) -> Tensors:
        """Return each tensor with each sibling's block taken from that rank's ``parts``.

        Tensors without blocks come from the first rank.
        """
        made = {}
        for name, value in like.items():
            total = parts[self.first].get(name, torch.zeros_like(value)).clone()
            for rank, index in self.blocks_of(name).items():
                total[index] = parts[rank][name][index] if name in parts[rank] else 0.0
            made[name] = total
        return made

    def unlike(self) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Yield the tensors that members hold whole with different gradients: name, the first's and the others'."""
        analysis = self.case.counterfactuals.analysis
        for name, right in self.case.expected.contract.items():
            held = [step for step in self.members.values() if name in step.before]
            if len(held) < 2:
                continue
            first, *others = [step.gradients.get(name, torch.zeros_like(right)).double() for step in held]
            noise = analysis.noise.at(name, self.case.expected.units[name])
            if any(distance(other, first) > analysis.limit * noise for other in others):
                yield name, first, others
