"""Tells which pipeline stages follow each other, and whether gradients arrive at one as another computed them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from plumbline.check.rank.joint.copies_and_parts import COARSE, LIMIT, LIMIT_16_BIT
from plumbline.check.rank.joint.forward import RecordedCall
from plumbline.evidence.rank_file import tensor_bytes
from plumbline.recording.backward_passes import ReleasedRoot
from plumbline.recording.observer import Facts
from plumbline.recording.sharding import local
from plumbline.replay.alias import CallOutputs
from plumbline.replay.call import Activation, sample
from plumbline.replay.random_state import normal
from plumbline.replay.uses import COPIES

Sent = tuple[str, float, float]
"""A digest of activations, a projection of the gradient at them, and the sum of the projection's squared terms."""

_OUTPUTS: Any = CallOutputs._backward_cls
"""The node of a tracked call's outputs."""


def sent_for(root: Any, gradient: Tensor) -> Sent | None:
    """Return what the script gives as the gradient of activations, at which a backward pass begins.

    Scripts free the outputs of modules after they have sent them, so their recorded values count. None if the values
    are freed, and were not recorded.
    """
    node: Any = root.grad_fn
    if isinstance(root, ReleasedRoot) and not isinstance(node, _OUTPUTS):
        return None
    values = node.call.outputs[root.output_nr] if isinstance(node, _OUTPUTS) else sample(root)
    return _digest(values), *_projected(gradient)


_FACTORS = {"MulBackward0": ("_saved_other", "_saved_self"), "DotBackward0": ("_saved_tensor", "_saved_self")}
"""Nodes of products, with the attributes that hold the factor of the first and of the second input."""


def sent_as_product(root: Tensor) -> Sent | None:
    """Return what the script gives as the gradient of a module's output by a backward pass from their inner product.

    None if this number is no such product. The sum of an output times a mask looks alike, but is a loss.
    """
    node: Any = root.grad_fn
    if type(node).__name__ == "SumBackward0":
        node = node.next_functions[0][0]
    factors = _FACTORS.get(type(node).__name__, ())
    inputs = [(one, name) for one, name in zip(node.next_functions, factors, strict=False) if one[0] is not None]
    if len(inputs) != 1:
        return None
    (((output, number), name),) = inputs
    factor = getattr(node, name)
    while type(output).__name__ in COPIES:
        output, number = output.next_functions[0]
    if not isinstance(output, _OUTPUTS) or factor.numel() != output.sizes_of_outputs[number]:
        return None
    return _digest(output.call.outputs[number]), *_projected(factor)


def digests(activations: Iterable[Activation]) -> list[str]:
    """Return digests of activations that received a gradient."""
    return [_digest(one.sample) for one in activations if one.gradients]


def passed_on(calls: Sequence[RecordedCall], sent: Sequence[Sent], others: Sequence[Activation] = ()) -> Facts:
    """Return the gradients that were given at this rank's activations, and those at activations that it received.

    Outputs of modules may have been sent, too, although no backward pass begins there: their projection is NaN. The
    calls have the received activations, apart from ``others``.
    """
    known = {digest for digest, *_ in sent}
    outputs = {
        _digest(values)
        for one in calls
        for cotangents in one.cotangents.values()
        for values, cotangent in zip(one.call.outputs, cotangents, strict=True)
        if cotangent is not None
    }
    activations = {id(each): each for each in (*others, *(each for one in calls for each in one.call.activations))}
    received = [
        [_digest(activation.sample), *_projected(gradient)]
        for activation in activations.values()
        for gradient in activation.gradients.values()
    ]
    unknown = [[digest, math.nan, math.nan] for digest in sorted(outputs - known)]
    return {"sent": [*map(list, sent), *unknown], "received": received}


def changed_on_the_way(every: Sequence[Facts], unit: float) -> tuple[list[Facts], list[int]]:
    """Return the gradients that ranks received differently from how others computed them for the same values.

    Also return the ranks whose gradients at received activations were not compared: no backward pass of another rank
    begins at these values, or several ranks send or receive them, and it is not known how their gradients belong
    together.
    """
    sent, received = (_by_values([one[kind] for one in every]) for kind in ("sent", "received"))
    found: list[Facts] = []
    left_out: set[int] = set()
    limit = LIMIT_16_BIT if unit >= COARSE else LIMIT

    def differ(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return not abs(one[0] - other[0]) <= limit * unit * math.sqrt(one[1] + other[1])

    for digest, receivers in received.items():
        senders = sent.get(digest, {})
        (sender, arrived), *other_senders = sorted(senders.items()) or [(-1, (math.nan, math.nan))]
        (receiver, computed), *other_receivers = sorted(receivers.items())
        alike = not any(differ(arrived, one) for _, one in other_senders)
        alike &= not any(differ(computed, one) for _, one in other_receivers)
        if math.isnan(arrived[0]) or len(senders) != len(receivers) or not alike:
            left_out |= receivers.keys()
        elif differ(arrived, computed):
            noise = unit * math.sqrt(arrived[1] + computed[1])
            error = abs(arrived[0] - computed[0]) / noise if noise else math.inf
            factor = arrived[0] / computed[0] if computed[0] else math.inf
            found.append({"sender": receiver, "receiver": sender, "error": error, "factor": factor})
    return found, sorted(left_out)


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


def _by_values(every: Sequence[Sequence[Sequence[Any]]]) -> dict[str, dict[int, tuple[float, float]]]:
    """Return, for each digest and each rank that has it, the sums of its projections and of their squares."""
    sums: dict[str, dict[int, tuple[float, float]]] = {}
    for rank, own in enumerate(every):
        for digest, value, squares in own:
            before, length = sums.setdefault(digest, {}).get(rank, (0.0, 0.0))
            sums[digest][rank] = before + value, length + squares
    return sums


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
