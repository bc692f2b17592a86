"""Gradients that go from one stage of a pipeline to another: what was received for outputs is what was computed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from plumbline.check.rank.joint.forward import RecordedCall
from plumbline.evidence.rank_file import tensor_bytes
from plumbline.recording.observer import Facts
from plumbline.recording.sharding import local
from plumbline.replay.own_numbers import normal

LIMIT = 2.0**7
"""How many times as large as the noise a right error may be, as in ``comparison``."""


def passed_on(calls: Sequence[RecordedCall]) -> Facts:
    """Return what arrived at the outputs of this rank's calls, and at activations that they received.

    Each is a digest of the values, a projection of the gradient, and the length of its terms.
    """
    sent = [
        [_digest(values), *_projected(cotangent)]
        for one in calls
        for cotangents in one.cotangents.values()
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
    """Return the gradients that one rank received otherwise than another computed them for the same values.

    Values that several ranks send or receive are left out: how their gradients belong together is not known.
    """
    sent, received = (dict(_summed([one[kind] for one in every])) for kind in ("sent", "received"))
    found = []
    for digest, (sender, arrived, squares) in sent.items():
        if digest in received:
            receiver, computed, others = received[digest]
            noise = unit * math.sqrt(squares + others)
            if sender >= 0 <= receiver and abs(arrived - computed) > LIMIT * noise:
                error = abs(arrived - computed) / noise if noise else math.inf
                factor = arrived / computed if computed else math.inf
                found.append({"sender": receiver, "receiver": sender, "error": error, "factor": factor})
    return found


def _summed(every: Sequence[Sequence[Sequence[float]]]) -> Iterator[tuple[object, tuple[int, float, float]]]:
    """Yield each digest with its rank, -1 if it is on several, and the sums over what was noted for it."""
    sums: dict[object, tuple[int, float, float]] = {}
    for rank, own in enumerate(every):
        for digest, value, squares in own:
            holder, before, length = sums.get(digest, (rank, 0.0, 0.0))
            sums[digest] = rank if holder == rank else -1, before + value, length + squares
    yield from sums.items()


def _digest(values: Tensor) -> str:
    content = tensor_bytes(local(values).detach().cpu())
    return hashlib.blake2b(content, digest_size=8).hexdigest() + str(values.dtype)


def _projected(gradient: Tensor) -> tuple[float, float]:
    own = local(gradient).detach().double().cpu().reshape(-1)
    generator = torch.Generator().manual_seed(own.numel())
    terms = own * normal(own.shape, generator)
    return float(terms.sum()), float(terms.square().sum())
