"""Tells which pipeline stages follow each other, and whether gradients arrive at one as another computed them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from plumbline.check.rank.joint.copies_and_parts import COARSE
from plumbline.check.rank.joint.forward import RecordedCall
from plumbline.evidence.rank_file import tensor_bytes
from plumbline.recording.observer import Facts
from plumbline.recording.sharding import local
from plumbline.replay.own_numbers import normal

LIMIT = 2.0**7
"""Largest error of a right gradient, in multiples of the noise, as in ``derivative``."""

LIMIT_16_BIT = 2.0**4
"""The same in 16-bit formats, as in ``derivative``."""


def passed_on(calls: Sequence[RecordedCall], of_outputs: Collection[int]) -> Facts:
    """Return the gradients at the outputs of this rank's calls, and at the activations that they received.

    Each has a digest of the values, a projection of the gradient, and the sum of the projection's squared terms. In
    passes that do not begin at outputs, what the script computes from an output may add to its gradient, so the
    projection is NaN.
    """
    sent = [
        [_digest(values), *(_projected(cotangent) if number in of_outputs else (math.nan, math.nan))]
        for one in calls
        for number, cotangents in one.cotangents.items()
        for values, cotangent in zip(one.call.outputs, cotangents, strict=True)
        if cotangent is not None
    ]
    received = [
        [_digest(activation.sample), *_projected(gradient)]
        for one in calls
        for activation in one.call.activations
        for gradient in activation.gradients.values()
    ]
    return {"sent": sent, "received": received}


def changed_on_the_way(every: Sequence[Facts], unit: float) -> list[Facts]:
    """Return the gradients that one rank received differently from how another computed them for the same values.

    Values that several ranks send or receive are left out: it is not known how their gradients belong together.
    """
    sent, received = (dict(_summed([one[kind] for one in every])) for kind in ("sent", "received"))
    found, limit = [], LIMIT_16_BIT if unit >= COARSE else LIMIT
    for digest, (sender, arrived, squares) in sent.items():
        if digest in received:
            receiver, computed, others = received[digest]
            noise = unit * math.sqrt(squares + others)
            if sender >= 0 <= receiver and abs(arrived - computed) > limit * noise:
                error = abs(arrived - computed) / noise if noise else math.inf
                factor = arrived / computed if computed else math.inf
                found.append({"sender": receiver, "receiver": sender, "error": error, "factor": factor})
    return found


def successive(every: Sequence[Facts]) -> set[frozenset[int]]:
    """Return the pairs of ranks of which one receives activations that result from those of the other.

    Ranks that receive from each other, directly or not, are left out.
    """
    after: dict[int, set[int]] = {rank: set() for rank in range(len(every))}
    for rank, own in enumerate(every):
        sent = {digest for digest, *_ in own["sent"]}
        after[rank].update(
            other for other, one in enumerate(every) if other != rank and sent & {each for each, *_ in one["received"]}
        )
    for middle in after:
        for found in after.values():
            if middle in found:
                found |= after[middle]
    return {frozenset((one, other)) for one, found in after.items() for other in found if one not in after[other]}


def _summed(every: Sequence[Sequence[Sequence[float]]]) -> Iterator[tuple[object, tuple[int, float, float]]]:
    """Yield each digest with its rank, -1 if several have it, and the sums of its projections and their squares."""
    sums: dict[object, tuple[int, float, float]] = {}
    for rank, own in enumerate(every):
        for digest, value, squares in own:
            holder, before, length = sums.get(digest, (rank, 0.0, 0.0))
            sums[digest] = rank if holder == rank else -1, before + value, length + squares
    yield from sums.items()


def _digest(values: Tensor) -> str:
    """Return a digest that stays the same if values are sent in a wider or a narrower format than they were computed.

    Under autocast, a script may convert a stage's 16-bit outputs to float32 before it sends them.
    """
    own = local(values).detach().cpu()
    content = tensor_bytes(own.to(torch.bfloat16) if own.is_floating_point() else own)
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _projected(gradient: Tensor) -> tuple[float, float]:
    own = local(gradient).detach().double().cpu().reshape(-1)
    generator = torch.Generator().manual_seed(own.numel())
    terms = own * normal(own.shape, generator)
    return float(terms.sum()), float(terms.square().sum())
