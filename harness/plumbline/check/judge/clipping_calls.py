"""The calls that clipped gradients, and comparisons of norms and gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from plumbline.check.evidence.training import Facts, RecordedTraining
from plumbline.check.judge.noted import ObserverFacts, side_by_side
from plumbline.evidence.training_record import step_copies

OBSERVER = "clipping"

NORM_KNOWN_TO = 0.01
"""Relative error of a norm that the script computed.

Chosen: sums in float32 over millions of entries are rarely worse, but how a script adds up is not recorded. Clipping by
a norm that is off by less goes unnoticed.
"""

TO_AVOID_ZERO = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""


def complete(one: ObserverFacts) -> list[Facts]:
    """Return the calls between the last backward pass of a step and the step."""
    last = last_pass(one)
    return [call for call in one.facts["calls"] if not call["late"] and (last is None or call["pass"] >= last)]


def last_pass(one: ObserverFacts) -> int | None:
    """Return the number of the last backward pass of a step, None without any."""
    return max((each.number for each in one.step.passes), default=None)


def is_effective(call: Facts, facts: Facts) -> bool:
    """Return whether a call made gradients shorter."""
    return bool(call["factor"] < 1 - facts["roundings"])


def is_limit_unscaled(limit: float, scale: float) -> bool:
    """Return whether gradients with a loss scale in them were clipped to a limit that is not multiplied by it.

    A limit that is multiplied by the scale is right, and far larger than one that is not.
    """
    return scale >= 1024 and limit < math.sqrt(scale)


def last_calls(
    training: RecordedTraining, *, sharded: bool, kinds: Collection[str] = ("norm",), on_all_ranks: bool = True
) -> Iterator[tuple[Mapping[int, ObserverFacts], dict[int, Facts]]]:
    """Yield steps that every rank took with the same model, and the last clipping call of each rank before them.

    ``on_all_ranks``: only steps before which every rank clipped are included. ``sharded``: all these ranks clipped
    sharded gradients; otherwise all clipped whole ones.
    """
    for ranks in side_by_side(training, OBSERVER):
        calls = {rank: own[-1] for rank, one in ranks.items() if (own := complete(one))}
        clip = len(calls) == len(ranks) if on_all_ranks else bool(calls)
        is_copied = clip and 1 < len(ranks) == training.world_size and step_copies(ranks.values())
        in_parts = any(not each.is_held for one in ranks.values() for each in one.step.parameters)
        if is_copied and all(
            call["kind"] in kinds and (call["sharded"] or in_parts) == sharded for call in calls.values()
        ):
            yield ranks, calls


def differ(norms: Sequence[float | None], by: float) -> bool:
    """Return whether all norms are known and differ by more than ``by``, relative to the largest."""
    known = [norm for norm in norms if norm is not None]
    return len(known) == len(norms) and max(known) - min(known) > by * max(known)


def are_equal(gradients: Sequence[Tensor | None], rounding: float) -> bool:
    """Return whether all gradients are known and equal the first one within ``rounding``, relative to its norm."""
    vectors = [vector.nan_to_num() for vector in gradients if vector is not None]
    if len(vectors) < len(gradients):
        return False
    most = rounding * float(vectors[0].norm())
    return all(float(torch.linalg.vector_norm(vector - vectors[0])) <= most for vector in vectors)
