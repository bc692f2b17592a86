"""Are ranks moved by each other's steps? Then their parameters lie in the same memory, and who is seen when is chance.

Each rank makes the right update, and each lands on all of them: whole, late, or torn in the middle of a tensor. What
stays, whatever the order was: between two looks every single weight moved by a whole number of right updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from harness.core.trace import RankTrace, Tensors
from harness.judge.causes.cause import Cause
from harness.judge.examination import Examination
from harness.judge.oracle import Oracle
from harness.judge.replay import stepped

_NEAR = 0.01
"""A weight moved k times by its update if it is no further from that than this part of one update."""


@dataclass(frozen=True, eq=False)
class _Move:
    """Where weights were, and where at the next look; which update was right there, and which at the step before.

    ``apart``: no optimizer of this rank stepped in between.
    """

    before: Tensors
    after: Tensors
    update: Tensors
    earlier: Tensors
    apart: bool


def moved_by_others(examination: Examination) -> Cause | None:
    """Return that ranks share their parameters' memory, None where anything but whole updates moved a weight.

    Updates that are the same multiple on all ranks, with nothing in between, are shared memory only where they are as
    many as there are ranks: two steps for one batch look the same.
    """
    world = examination.cell.processes
    if world == 1:
        return None
    by_others = False
    in_steps: list[Tensor] = []
    for trace in examination.trace.ranks:
        own = []
        for move in _moves(trace, examination):
            counted = _counted(move, world, examination.epsilon)
            if counted is None:
                return None
            times, late = counted
            by_others = by_others or bool(late.any()) or (move.apart and bool(times.any()))
            if not move.apart:
                own.append(times)
        in_steps.append(torch.cat(own))
    first = in_steps[0]
    if by_others or any(not torch.equal(one, first) for one in in_steps):
        look = "ranks are moved by each other's steps: do they share the parameters' memory?"
        return Cause("applied-once-a-rank", "averaging", look)
    if len(first) and bool((first == world).all()):
        look = f"the update was applied {world} times: do ranks share the parameters' memory?"
        return Cause("applied-once-a-rank", "averaging", look)
    return None


def _moves(trace: RankTrace, examination: Examination) -> Iterator[_Move]:
    """Yield what became of the weights in each step, and from there to the next."""
    oracle = Oracle(examination.workload, examination.devices)
    optimizer = oracle.optimizer()
    none = {name: torch.zeros_like(value) for name, value in oracle.weights().items()}
    earlier = none
    for step, following in pairwise([*trace.steps, None]):
        assert step is not None
        update = none
        if not step.skipped:
            weights = stepped(oracle, optimizer, step.before, step.gradients, step.learning_rates)
            update = {name: value - step.before[name].double() for name, value in weights.items()}
        # Where a step computes its own gradients, as closures do, it begins before the others' last steps have ended.
        yield _Move(step.before, step.after, update, earlier, apart=False)
        later = trace.final if following is None else following.before
        yield _Move(step.after, later or step.after, update, none, apart=True)
        earlier = update


def _counted(move: _Move, world: int, epsilon: float) -> tuple[Tensor, Tensor] | None:
    """Return how many updates each weight moved by, and how many of the step before; None where by no whole number.

    Weights are left out whose update drowns in their rounding.
    """
    every_times, every_late = [], []
    for name in move.update.keys() & move.before.keys() & move.after.keys():
        update, earlier = move.update[name].flatten(), move.earlier[name].flatten()
        before, after = move.before[name].double().flatten(), move.after[name].double().flatten()
        rounding = 2 * epsilon * torch.maximum(before.abs(), after.abs())
        if bool(((after - before).abs() > rounding)[(update == 0) & (earlier == 0)].any()):
            return None
        clear = rounding < _NEAR * update.abs()
        update, earlier, moved, rounding = update[clear], earlier[clear], (after - before)[clear], rounding[clear]
        times = torch.full_like(update, torch.nan)
        late = torch.zeros_like(update)
        for of_before in range(world):
            rest = moved - of_before * earlier
            whole = (rest / update).round()
            near = (rest - whole * update).abs() <= _NEAR * update.abs() + rounding
            found = times.isnan() & near & (whole >= 0) & (whole <= world)
            times, late = torch.where(found, whole, times), torch.where(found, of_before * (earlier != 0), late)
        if bool(times.isnan().any()):
            return None
        every_times.append(times)
        every_late.append(late)
    return (torch.cat(every_times), torch.cat(every_late)) if every_times else (torch.zeros(0), torch.zeros(0))
