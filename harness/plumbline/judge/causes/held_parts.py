"""What each rank holds of a shared model: blocks of tensors, whole tensors, and its own experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plumbline.evidence.trace import Block, Tensors, block_index
from plumbline.judge.causes.oracle_gradient_case import OracleGradientCase
from plumbline.judge.oracle.noise import distance
from plumbline.judge.oracle.oracle import mean_gradient


def on_stages(case: OracleGradientCase) -> dict[int, Tensors]:
    """Return the raw gradient of what each rank holds, where ranks hold whole tensors."""
    raw = case.expected.raw
    return {rank: {name: raw[name] for name in case.held.on(rank) & raw.keys()} for rank in case.held.ranks}


@dataclass(frozen=True, eq=False)
class HeldParts:
    """The ranks that hold a model together with a case's rank, and the parts that each of them holds."""

    case: OracleGradientCase

    @cached_property
    def first(self) -> int:
        """The first of the ranks that see the samples of the case, which is the one judged."""
        return next(iter(self.case.recorded))

    @cached_property
    def siblings(self) -> tuple[int, ...]:
        """The ranks whose blocks make up whole tensors, so that their norms add up to the whole gradient's."""
        cell = self.case.analysis.cell
        return next(group for group in cell.parallelism.norm_groups(cell.topology) if self.first in group)

    @cached_property
    def blocks(self) -> dict[int, dict[str, Block]]:
        """Each sibling's blocks, by parameter name, of the tensors that it does not hold whole."""
        recorded = self.case.analysis.recorded.ranks
        return {rank: recorded[rank].blocks for rank in self.siblings}

    def blocks_of(self, name: str) -> dict[int, tuple[slice, ...]]:
        """Return the index of each sibling's block of a tensor, by rank; empty if siblings hold it whole.

        If several siblings have the same block, the first one counts. If one has all entries, the others' blocks are
        empty.
        """
        indices: dict[int, tuple[slice, ...]] = {}
        for rank, own in self.blocks.items():
            if name in own and (index := block_index(own[name])) not in indices.values():
                indices[rank] = index
            elif name not in own and any(name in other for other in self.blocks.values()):
                indices[rank] = tuple(map(slice, self.case.expected.contract[name].shape))
        return indices

    @property
    def in_blocks(self) -> bool:
        return any(self.blocks.values())

    def on(self, rank: int, gradient: Tensors) -> Tensors:
        """Return a sibling's parts of a gradient; whole tensors count as the first rank's."""
        indices = {name: self.blocks_of(name) for name in gradient}
        own = {name: block_of(gradient[name], index[rank]) for name, index in indices.items() if rank in index}
        whole = {name: gradient[name] for name, index in indices.items() if not index}
        return {**own, **whole} if rank == self.first else own

    def blocks_on(self, rank: int, gradient: Tensors) -> list[Tensor]:
        """Return views of the blocks that a sibling has of a gradient, in the gradient's order."""
        indices = {name: self.blocks_of(name) for name in gradient}
        return [block_of(gradient[name], index[rank]) for name, index in indices.items() if rank in index]

    def are_runs(self, gradient: Tensors) -> bool:
        """Say whether blocks are runs of entries of flattened tensors."""
        return any(len(index) < gradient[name].dim() for name in gradient for index in self.blocks_of(name).values())

    def assembled_blocks(self, parts: dict[int, Tensors], like: Tensors) -> Tensors:
        """Return each tensor with blocks from the ranks' ``parts``; tensors without blocks are those of ``like``."""
        made = self.assembled(parts, like)
        return {name: made[name] if self.blocks_of(name) else value for name, value in like.items()}

    def assembled(self, parts: dict[int, Tensors], like: Tensors) -> Tensors:
        """Return each tensor with each sibling's block taken from that rank's ``parts``.

        Tensors without blocks come from the first rank.
        """
        made = {}
        for name, value in like.items():
            total = parts[self.first].get(name, torch.zeros_like(value)).clone(memory_format=torch.contiguous_format)
            for rank, index in self.blocks_of(name).items():
                block = block_of(total, index)
                block.copy_(block_of(parts[rank][name], index) if name in parts[rank] else torch.zeros_like(block))
            made[name] = total
        return made

    def unlike(self) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Yield whole tensors whose gradients differ between ranks of the same samples: name, first's, others'."""
        analysis = self.case.analysis
        for name, right in self.case.expected.contract.items():
            held = [step for step in self.case.recorded.values() if name in step.before]
            if len(held) < 2:
                continue
            first, *others = [step.gradients.get(name, torch.zeros_like(right)).double() for step in held]
            noise = analysis.noise.at(name, self.case.expected.units[name])
            if any(distance(other, first) > analysis.limit * noise for other in others):
                yield name, first, others


def block_of(tensor: Tensor, index: tuple[slice, ...]) -> Tensor:
    """Return a block of a tensor, a view if that is contiguous; an index of one dimension counts its entries."""
    return (tensor.reshape(-1) if len(index) < tensor.dim() else tensor)[index]


def _data_rank(case: OracleGradientCase, rank: int) -> int:
    return next(index for index, group in enumerate(case.analysis.replicas) if rank in group)


def mean_over(case: OracleGradientCase, ranks: tuple[int, ...]) -> Tensors:
    """Return the mean of the right gradients of the samples of some ranks."""
    shares = sorted({_data_rank(case, rank) for rank in ranks})
    return mean_gradient([[groups[share] for share in shares if share < len(groups)] for groups in case.expected.parts])


def own_experts(case: OracleGradientCase) -> dict[str, int]:
    """Return the first holder of each parameter that only some of the ranks that share one model hold."""
    cell = case.analysis.cell
    (group,) = [ranks for ranks in cell.parallelism.holders(cell.topology) if HeldParts(case).first in ranks]
    recorded = case.analysis.recorded_steps[case.index].ranks
    holders = {n: [rank for rank in group if n in recorded[rank].before] for n in case.expected.contract}
    return {name: ranks[0] for name, ranks in holders.items() if 0 < len(ranks) < len(group)}
