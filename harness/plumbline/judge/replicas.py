"""Joins the records of ranks that hold one model together, so that each judged rank has the whole model.

Ranks that see the same samples, such as the stages of a pipeline, are judged as one rank. Other ranks, such as those
with experts of their own, remain separate, and get the tensors that they lack from the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType

import torch

from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Tensors, Trace


def with_whole_models(trace: Trace, groups: Sequence[Sequence[int]]) -> Trace:
    """Return a launch's trace in which each rank has all tensors of its group, whose ranks hold one model together.

    A tensor that a rank lacks, or its gradient, comes from the first rank of the group that has it.
    """
    held = [{name for step in rank.steps for name in step.before} for rank in trace.ranks]
    together = [[rank for rank in group if rank < len(trace.ranks)] for group in groups]
    if all(held[rank] == held[group[0]] for group in together for rank in group):
        return trace
    ranks = list(trace.ranks)
    for group in together:
        for rank in group:
            ranks[rank] = _completed(trace.ranks[rank], [trace.ranks[one] for one in (rank, *group)])
    return replace(trace, ranks=tuple(ranks))


def _completed(rank: RankTrace, holders: Sequence[RankTrace]) -> RankTrace:
    finals = [one.final for one in holders if one.final is not None]
    steps = zip(*(one.steps for one in holders), strict=False)
    return replace(
        rank,
        steps=tuple(map(with_tensors_of_all, steps)),
        final=_first_of_each(finals) if rank.final is not None else None,
        final_buffers=_first_of_each(one.final_buffers for one in holders),
    )


def as_replicas(
    trace: Trace, groups: Sequence[Sequence[int]], mask_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> Trace:
    """Return a launch's trace with one rank for each of these groups; unchanged if all groups have one rank.

    A tensor that several ranks of a group hold comes from the first: another check tells whether they agree. If each
    rank drew a mask for its part of an activation, the parts are joined to masks of ``mask_shapes``.
    """
    if all(len(group) == 1 for group in groups):
        return trace
    members = ([trace.ranks[rank] for rank in group if rank < len(trace.ranks)] for group in groups)
    replicas = (_replica(index, ranks, mask_shapes) for index, ranks in enumerate(members) if ranks)
    return replace(trace, ranks=tuple(replicas))


def with_empty_steps(trace: Trace, groups: Sequence[Sequence[int]]) -> Trace:
    """Return the trace in which a rank without parameters has an empty step for each step of its group.

    Such a rank has nothing to step, so it may never call an optimizer.
    """
    idle = {
        rank: max(len(trace.ranks[other].steps) for other in group if other < len(trace.ranks))
        for group in groups
        for rank in group
        if rank < len(trace.ranks) and trace.ranks[rank].holds_nothing and not trace.ranks[rank].steps
    }
    nothing = Step((), {}, {}, {}, ())
    ranks = (replace(one, steps=(nothing,) * idle[r]) if r in idle else one for r, one in enumerate(trace.ranks))
    return replace(trace, ranks=tuple(ranks)) if idle else trace


def _replica(place: int, ranks: Sequence[RankTrace], mask_shapes: Mapping[str, tuple[int, ...]]) -> RankTrace:
    takes_loss = max(ranks, key=lambda rank: sum(map(_losses, rank.steps)))
    finals = [rank.final for rank in ranks if rank.final is not None]
    return replace(
        takes_loss,
        rank=place,
        steps=tuple(_step(parts, mask_shapes) for parts in zip(*(rank.steps for rank in ranks), strict=False)),
        final=_first_of_each(finals) if finals else None,
        final_buffers=_first_of_each(rank.final_buffers for rank in ranks),
        # Every rank may report the metrics, or one alone.
        logged=takes_loss.logged or next((rank.logged for rank in ranks if rank.logged), ()),
    )


def _step(parts: Sequence[Step], mask_shapes: Mapping[str, tuple[int, ...]]) -> Step:
    return replace(
        with_tensors_of_all(parts),
        micro_batches=_micro_batches(parts, mask_shapes),
        skipped=any(part.skipped for part in parts),
        turns=tuple(
            tuple(dict.fromkeys(name for names in turn for name in names))
            for turn in zip(*(part.turns for part in parts), strict=False)
        ),
    )


def with_tensors_of_all(parts: Sequence[Step]) -> Step:
    """Return the first of these steps with all weights, gradients and buffers, each from the first that holds it."""
    holders: dict[str, Step] = {}
    for part in parts:
        for name in part.before:
            holders.setdefault(name, part)
    return replace(
        parts[0],
        before=_first_of_each(part.before for part in parts),
        # If a parameter's first holder has no gradient of it, there is none, even if other ranks have one.
        gradients={name: part.gradients[name] for name, part in holders.items() if name in part.gradients},
        after=_first_of_each(part.after for part in parts),
        # A stage without parameters may have no optimizer.
        learning_rates=next((part for part in parts if part.before), parts[0]).learning_rates,
        buffers=_first_of_each(part.buffers for part in parts),
        held_back={name: part.held_back[name] for name, part in holders.items() if name in part.held_back},
        off_masters={name: far for part in reversed(parts) for name, far in part.off_masters.items()},
    )


def holders_of(parts: Sequence[Step]) -> dict[str, tuple[int, ...]]:
    """Return the places in ``parts`` of the ranks that hold each parameter."""
    names = dict.fromkeys(name for part in parts for name in part.before)
    return {name: tuple(index for index, part in enumerate(parts) if name in part.before) for name in names}


def _micro_batches(parts: Sequence[Step], mask_shapes: Mapping[str, tuple[int, ...]]) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of a replica: one rank has their samples, and another may have only the loss.

    A rank that computes several forwards before a loss records them as one micro-batch, so the samples come from the
    rank that recorded the most.
    """
    most = max(parts, key=lambda part: sum(any(micro.forwards) for micro in part.micro_batches))
    parts = [most, *(part for part in parts if part is not most)]
    return tuple(
        MicroBatch(
            forwards=next(micro.forwards for micro in passes if micro is not None),
            loss=next((micro.loss for micro in passes if micro is not None and micro.loss is not None), None),
            drawn=_masks([micro.drawn for micro in passes if micro is not None], mask_shapes),
        )
        for passes in zip_longest(*(part.micro_batches for part in parts))
    )


def _masks(drawn: Sequence[Tensors], shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Return the masks of a replica: the first rank's, or the joined parts of all ranks if these make up a whole."""
    joined = _first_of_each(drawn)
    for name, first in joined.items():
        parts = [masks[name] for masks in drawn if name in masks]
        shape = (len(first), *shapes.get(name, first.shape[1:]))
        for dim in range(1, first.dim()):
            others = [size for at, size in enumerate(shape) if at != dim]
            fits = all([size for at, size in enumerate(part.shape) if at != dim] == others for part in parts)
            if first.shape != shape and fits and sum(part.shape[dim] for part in parts) == shape[dim]:
                joined[name] = torch.cat(parts, dim)
    return joined


def _losses(step: Step) -> int:
    return sum(micro.loss is not None for micro in step.micro_batches)


def _first_of_each(several: Iterable[Tensors]) -> Tensors:
    joined: Tensors = {}
    for tensors in several:
        for name, value in tensors.items():
            joined.setdefault(name, value)
    return joined
