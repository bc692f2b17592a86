"""Finds ranks that share their parameters' memory, so that each rank's steps also move the other ranks' weights.

Each rank makes the right update, which is applied on all ranks: at once, late, or to a part of a tensor. In any order,
every weight moves by a whole number of right updates between two recorded steps, and over the whole training by the
updates of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from plumbline.evidence.trace import RankTrace, Tensors, same
from plumbline.judge.hypothesis import Hypothesis, Match, TraceCase
from plumbline.judge.oracle.oracle import Oracle
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.judge.update_replay import weights_after

_NEAR = 0.01
"""A weight counts as moved by k updates if it is this near to that, as a part of one update.

This is a chosen number: it decides which weights, of those known to be wrong, are explained by shared memory.
"""


@dataclass(frozen=True, eq=False)
class _Move:
    """The weights at two consecutive recorded steps, the right update between them, and the update of the step before.

    ``between_steps``: no optimizer of this rank stepped in between.
    """

    before: Tensors
    after: Tensors
    update: Tensors
    earlier: Tensors
    between_steps: bool


@dataclass(frozen=True, eq=False)
class _Count:
    """The number of updates by which each weight moved, NaN if unknown; ``late`` counts updates of the step before."""

    times: Tensor
    late: Tensor
    between_steps: bool


def moved_by_others(analysis: TraceAnalysis) -> Match | None:
    """Return a match if ranks share their parameters' memory, None if the evidence refutes it or cannot tell.

    The evidence has three parts, which must all hold. All ranks have the same gradients, or their updates could not be
    told apart. On every rank, every weight moved by whole updates. Over the training, every rank's weights moved by the
    updates of all ranks, except for updates of the last step that were not applied yet. Ranks that merely diverged move
    by their own updates only.
    """
    world = analysis.world
    if world == 1 or not _same_gradients(analysis):
        return None
    by_others = once = False
    for trace in analysis.trace.ranks:
        counts = []
        for move in _moves(trace, analysis):
            counted = _counted(move, world, analysis.epsilon)
            if counted is None:
                return None
            counts.append(counted)
        if not _all_applied(counts, world):
            return None
        by_others = by_others or any(_is_by_others(count, world) for count in counts)
        once = once or any(bool((count.times == 1).any()) for count in counts)
    if by_others:
        return Match(figures={"observed": "the other ranks' steps also move a rank's weights", "or_else": ""})
    if once:
        return None
    # A rank that steps ``world`` times also moves every weight by ``world`` updates at once.
    return Match(
        figures={
            "observed": f"the update was applied {world} times in every step",
            "or_else": ", or step more than once",
        }
    )


def _shared(case: TraceCase) -> Iterator[Match]:
    if (match := moved_by_others(case.analysis)) is not None:
        yield match


SHARED_MEMORY: Hypothesis[TraceCase, Match] = Hypothesis(
    "applied-once-a-rank", "averaging", _shared,
    "{observed}",
    "check whether ranks share the parameters' memory{or_else}", 150,
)  # fmt: skip


def _same_gradients(analysis: TraceAnalysis) -> bool:
    return all(
        same(step.gradients, global_step.ranks[0].gradients)
        for global_step in analysis.steps
        for step in global_step.ranks
    )


def _is_by_others(count: _Count, world: int) -> bool:
    """Return whether some weight moved by another rank's update: between steps, late, or by only some ranks' updates.

    If all weights move by ``world`` updates at once, their own rank may have stepped that often.
    """
    known = ~count.times.isnan()
    if count.between_steps:
        return bool((count.times > 0)[known].any())
    return bool((count.late > 0).any()) or bool(((count.times != 1) & (count.times != world))[known].any())


def _all_applied(counts: list[_Count], world: int) -> bool:
    """Return whether weights moved by ``world`` updates for each step, except for updates not applied yet.

    The median weight decides, because a weight is miscounted if two updates happen to be multiples of each other.
    """
    taken = [count for count in counts if not count.between_steps and not bool(count.times.isnan().all())]
    if not taken:
        return False
    clear = ~torch.stack([count.times.isnan() for count in taken]).any(0)
    total = torch.stack([count.times.nan_to_num() + count.late for count in counts]).sum(0)[clear]
    most = world * len(taken)
    return len(total) > 0 and most - (world - 1) <= float(total.median()) <= most


def _moves(trace: RankTrace, analysis: TraceAnalysis) -> Iterator[_Move]:
    oracle = Oracle(analysis.workload, analysis.devices)
    optimizer = oracle.optimizer()
    none = {name: torch.zeros_like(value) for name, value in oracle.weights().items()}
    earlier = none
    for step, following in pairwise([*trace.steps, None]):
        assert step is not None
        update = none
        if not step.skipped:
            weights = weights_after(oracle, optimizer, step.before, step.gradients, step.learning_rates)
            update = {name: value - step.before[name].double() for name, value in weights.items()}
        # A step that computes its own gradients, as with a closure, begins before other ranks' previous steps end.
        yield _Move(step.before, step.after, update, earlier, between_steps=False)
        later = trace.final if following is None else following.before
        yield _Move(step.after, later or step.after, update, none, between_steps=True)
        earlier = update


def _counted(move: _Move, world: int, epsilon: float) -> _Count | None:
    """Return by how many updates each weight moved; None if it is not a whole number.

    The number is unknown for weights whose update is smaller than their rounding.
    """
    every_times, every_late = [], []
    for name in sorted(move.update.keys() & move.before.keys() & move.after.keys()):
        update, earlier = move.update[name].flatten(), move.earlier[name].flatten()
        before, after = move.before[name].double().flatten(), move.after[name].double().flatten()
        rounding = 2 * epsilon * torch.maximum(before.abs(), after.abs())
        moved = after - before
        if bool((moved.abs() > rounding)[(update == 0) & (earlier == 0)].any()):
            return None
        clear = rounding < _NEAR * update.abs()
        times = torch.full_like(update, torch.nan)
        late = torch.zeros_like(update)
        for of_before in range(world):
            rest = moved - of_before * earlier
            whole = (rest / update).round()
            near = (rest - whole * update).abs() <= _NEAR * update.abs() + rounding
            found = clear & times.isnan() & near & (whole >= 0) & (whole <= world)
            times, late = torch.where(found, whole, times), torch.where(found, of_before * (earlier != 0), late)
        if bool(times.isnan()[clear].any()):
            return None
        every_times.append(times)
        every_late.append(late)
    if not every_times:
        return None
    return _Count(torch.cat(every_times), torch.cat(every_late), move.between_steps)
