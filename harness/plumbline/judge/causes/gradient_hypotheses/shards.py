"""Right shards and blocks of tensors that are missing, one step late, or in the wrong place."""

from __future__ import annotations

import torch

from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.held_parts import HeldParts, block_of
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import register
from plumbline.judge.oracle.noise import distance, norm

MOST_COMPARED = 2**24
"""The largest number of pairs of entries to compare when searching for the origin of a run of entries."""


def _missing(case: OracleGradientCase) -> Gradients:
    held = HeldParts(case)
    without = {
        rank
        for rank in (held.siblings if held.in_blocks else ())
        if any(map(norm, held.blocks_on(rank, case.expected.raw)))
        and not any(map(norm, held.blocks_on(rank, case.observed)))
    }
    if 0 < len(without) < len(held.siblings):
        for right in (case.expected.raw, case.expected.contract):
            zeros = {name: torch.zeros_like(value) for name, value in right.items()}
            parts = {rank: zeros if rank in without else right for rank in held.siblings}
            yield case.clipped(held.assembled_blocks(parts, right))


def _one_step_late(case: OracleGradientCase) -> Gradients:
    """Predict the blocks of the previous step for the ranks whose blocks are nearer to those than to the right ones."""
    held = HeldParts(case)
    if not held.in_blocks or not case.earlier_expected or case.clip_norm is not None:
        return
    now, before = case.expected.raw, case.earlier_expected[0].raw
    if now.keys() != before.keys():
        return
    late = {rank for rank in held.siblings if _is_nearer(held, rank, case.observed, before, now)}
    if 0 < len(late) < len(held.siblings):
        yield held.assembled_blocks({rank: before if rank in late else now for rank in held.siblings}, now)


def _is_nearer(held: HeldParts, rank: int, observed: Tensors, one: Tensors, other: Tensors) -> bool:
    apart = [
        sum(
            distance(*pair) ** 2
            for pair in zip(held.blocks_on(rank, observed), held.blocks_on(rank, right), strict=True)
        )
        for right in (one, other)
    ]
    return apart[0] < apart[1]


def _of_another_rank(case: OracleGradientCase) -> Gradients:
    """Predict each block as the nearest of all ranks' right blocks of the tensor."""
    held, raw = HeldParts(case), case.expected.raw
    if not held.in_blocks or case.clip_norm is not None:
        return
    total = {name: value.clone(memory_format=torch.contiguous_format) for name, value in raw.items()}
    exchanged = False
    for name, value in raw.items():
        blocks = {rank: block_of(value, index) for rank, index in held.blocks_of(name).items()}
        for rank, index in held.blocks_of(name).items():
            alike = {other: block for other, block in blocks.items() if block.shape == blocks[rank].shape}
            seen = block_of(case.observed[name], index)
            nearest = min(alike, key=lambda other: distance(seen, alike[other]))
            block_of(total[name], index).copy_(alike[nearest])
            exchanged |= nearest != rank
    if exchanged:
        yield total


def _shifted(case: OracleGradientCase) -> Gradients:
    """Predict each rank's run of a flat tensor as the nearest run of the right one, wherever it begins."""
    held, raw = HeldParts(case), case.expected.raw
    if case.clip_norm is not None or not held.in_blocks or not held.are_runs(raw):
        return
    whole = torch.cat([raw[name].reshape(-1) for name in raw])
    total, shifted = {name: value.clone(memory_format=torch.contiguous_format) for name, value in raw.items()}, False
    for rank in held.siblings:
        seen = torch.cat([block.reshape(-1) for block in held.blocks_on(rank, case.observed)] or [whole[:0]])
        if not len(seen) or len(seen) * len(whole) > MOST_COMPARED:
            continue
        runs = whole.unfold(0, len(seen), 1)
        nearest = int((runs - seen).square().sum(1).argmin())
        run = runs[nearest]
        shifted |= not torch.equal(run, torch.cat([b.reshape(-1) for b in held.blocks_on(rank, raw)]))
        for block in held.blocks_on(rank, total):
            block.copy_(run[: block.numel()].view_as(block))
            run = run[block.numel() :]
    if shifted:
        yield total


register(
    OracleGradientCase,
    GradientHypothesis("shard-without-gradient", "sync", _missing,
        "right, but zero for the shards of some ranks",
        "check which entries these ranks treat as padding, and that the reduction writes to the tensors that the "
        "optimizer steps", 941),
    GradientHypothesis("shards-one-step-late", "sync", _one_step_late,
        "right, but the shards of some ranks are the right ones of the previous step",
        "wait for the reduction before the step, and do not use its buffer again before", 320.5),
    GradientHypothesis("blocks-of-another-rank", "sync", _of_another_rank,
        "right, but some ranks have another rank's block of a tensor",
        "check at which offset each rank reads and writes its part, in the forward and in the backward", 319.5),
    GradientHypothesis("shifted-in-a-flat-tensor", "sync", _shifted,
        "the right entries of a flat tensor, but on some ranks they begin at a different position",
        "pad and divide gradients exactly as weights, so that a rank's pieces of both are the same entries", 319),
)  # fmt: skip
