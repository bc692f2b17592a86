"""Samples with the right ids but other contents, and micro-batches of a pipeline that were mixed up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import Match, register
from plumbline.judge.oracle.layout import Layout, Share, sample_of, samples
from plumbline.judge.oracle.noise import norm
from plumbline.judge.oracle.oracle import Oracle, mean_gradient


def _held_out(case: OracleGradientCase) -> Gradients:
    with case.counterfactuals.at(case.index) as oracle:
        training, held_out = oracle.data, oracle.held_out
        if max(samples(case.layout), default=0) >= len(held_out):
            return
        oracle.data = held_out
        parts = oracle.group_gradients(case.layout)
        oracle.data = training
    yield case.clipped(mean_gradient(parts))


def _of_other_samples(case: OracleGradientCase) -> Gradients:
    """Predict that one column of the data comes from other samples than the rest, on one rank or on all.

    These are neighbours in the batch, the next rank's samples, or the samples of the rank's previous batch.
    """
    batches = _batches(case.layout)
    before = case.analysis.layouts.get(case.index - 1)
    if case.is_staged or not batches:
        return
    everyone = range(len(batches[0]))
    columns = case.analysis.oracle.data.columns
    for others in _taken_for(batches, _batches(before)[-1] if before else ()):
        for ranks in (everyone, *([rank] for rank in everyone if len(everyone) > 1)):
            own: list[int] = []
            found: list[int] = []
            for batch, other in zip(batches, others, strict=True):
                for rank in ranks:
                    if rank < min(len(batch), len(other)) and len(batch[rank]) == len(other[rank]):
                        own += batch[rank]
                        found += other[rank]
            for name in columns.keys() - {"index"} if own != found else ():
                column = columns[name].clone()
                column[own] = columns[name][found]
                yield from case.if_wrong(case.clipped(case.counterfactuals.with_column(case.index, name, column)))


Batch = Sequence[Sequence[int]]
"""The samples of each rank."""


def _batches(layout: Layout) -> list[Batch]:
    return [[[sample_of(i) for share in group for i in share] for group in groups] for groups in layout]


def _taken_for(batches: Sequence[Batch], before: Batch) -> Iterator[Sequence[Batch]]:
    """Yield the samples that replace those of each batch; ``before`` is the last batch of the previous step."""
    for shift in (1, -1):
        yield [[[*own[shift:], *own[:shift]] for own in batch] for batch in batches]
        yield [[*batch[shift:], *batch[:shift]] for batch in batches]
    yield [before, *batches[:-1]]


def partners(count: int) -> Iterator[tuple[int, ...]]:
    """Yield which micro-batch replaces each micro-batch of a batch: reversed, shifted, or the same one for all."""
    order = tuple(range(count))
    if count > 2:
        yield order[::-1]
    for shift in range(1, count):
        yield order[shift:] + order[:shift]
    yield from ((one,) * count for one in order)


def _shares(case: OracleGradientCase) -> list[list[Share]]:
    layout, size = case.layout, case.batch_parts
    if size == 1 or len(layout) % size or any(len(groups) > 1 or len(groups[0]) > 1 for groups in layout):
        return []
    shares = [groups[0][0] for groups in layout]
    return [shares[first : first + size] for first in range(0, len(shares), size)]


def _other_targets(case: OracleGradientCase) -> Gradients:
    batches = _shares(case)
    made: dict[tuple[Share, Share], Tensors] = {}
    for partner in partners(case.batch_parts) if batches else ():
        with case.counterfactuals.at(case.index) as oracle:
            for own in batches:
                for share, other in zip(own, (own[place] for place in partner), strict=True):
                    if (share, other) not in made and len(share) == len(other):
                        made[share, other] = oracle.gradient_with_targets(share, other)
        pairs = [(share, own[place]) for own in batches for share, place in zip(own, partner, strict=True)]
        if all(pair in made for pair in pairs):
            yield case.clipped(mean_gradient([[made[pair]] for pair in pairs]))


def _other_activations(case: OracleGradientCase) -> Gradients:
    """Predict that a micro-batch's gradient goes back through another one's activations, at one boundary.

    A boundary is a layer's output that every path from earlier to later layers passes through.
    """
    (own, *others) = _shares(case) or [[]]
    if not own or others or case.clip_norm is not None or not case.in_stages:
        return
    with case.counterfactuals.at(case.index) as oracle:
        ranks = {id(p): case.held.holders[n][0] for n, p in oracle.parameters.items() if n in case.held.holders}
        passes = [_layer_outputs(oracle, share) for share in own]
        for number in _boundaries([layer for layer, _ in passes[0][0]], ranks):
            yield from _crossed(case, oracle, passes, number)


def _crossed(
    case: OracleGradientCase,
    oracle: Oracle,
    passes: Sequence[tuple[list[tuple[nn.Module, Tensor]], Tensor]],
    number: int,
) -> Gradients:
    """Predict gradients that cross micro-batches at the output of layer ``number``."""
    activations = [outputs[number][1] for outputs, _ in passes]
    if not all(one.requires_grad for one in activations):
        return
    arriving = [
        torch.autograd.grad(loss, one, retain_graph=True)[0] for (_, loss), one in zip(passes, activations, strict=True)
    ]

    def through(place: int, other: int) -> Tensors:
        made = torch.autograd.grad(
            activations[place], tuple(oracle.trained.values()), arriving[other], retain_graph=True, allow_unused=True
        )
        return {name: value for name, value in zip(oracle.trained, made, strict=True) if value is not None}

    right = mean_gradient([[through(index, index)] for index in range(len(passes))])
    raw = case.expected.raw
    if any(norm(value - raw[name]) > 1e-9 * norm(raw[name]) for name, value in right.items()):
        return  # another path bypasses this output
    for partner in partners(len(passes)):
        yield {**raw, **mean_gradient([[through(*pair)] for pair in enumerate(partner)])}


def _layer_outputs(oracle: Oracle, share: Share) -> tuple[list[tuple[nn.Module, Tensor]], Tensor]:
    outputs: list[tuple[nn.Module, Tensor]] = []

    def keep(layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((layer, output))

    leaves = [layer for layer in oracle.model.modules() if not any(layer.children())]
    handles = [layer.register_forward_hook(keep) for layer in leaves]
    try:
        return outputs, oracle.loss_of(share)
    finally:
        for handle in handles:
            handle.remove()


def _boundaries(layers: Sequence[nn.Module], ranks: dict[int, int]) -> Iterator[int]:
    """Yield the place of each layer after which another rank's layers may begin."""
    of_layer = [next((ranks[id(p)] for p in layer.parameters() if id(p) in ranks), None) for layer in layers]
    for number in range(len(layers) - 1):
        then = next((rank for rank in of_layer[number + 1 :] if rank is not None), None)
        now = next((rank for rank in reversed(of_layer[: number + 1]) if rank is not None), None)
        if now is not None and then is not None and now != then:
            yield number


def _in_another_order(case: OracleGradientCase) -> Gradients:
    orders = [[micro.samples for micro in step.micro_batches if micro.samples] for step in case.recorded.values()]
    if case.in_stages and case.pattern.every_step and case.clip_norm is None and _differ(orders):
        yield Match()


def _differ(orders: Sequence[Sequence[Any]]) -> bool:
    return any(sorted(one) == sorted(orders[0]) and one != orders[0] for one in orders[1:])


register(
    OracleGradientCase,
    GradientHypothesis("trained-on-held-out-data", "data", _held_out,
        "those of the held-out samples",
        "check whether a loader of the validation set is used for training", 210),
    GradientHypothesis("of-other-samples", "data", _of_other_samples,
        "those of samples whose inputs are paired with other samples' targets",
        "shuffle, shard and collate inputs and targets in the same way", 207),
    GradientHypothesis("targets-of-another-micro-batch", "data", _other_targets,
        "those of one micro-batch's activations with the targets of another",
        "count micro-batches in the last stage as in the first one", 336),
    GradientHypothesis("activations-of-another-micro-batch", "data", _other_activations,
        "right, but on {wrong_ranks} ({held}) the backward went through the activations of another micro-batch",
        "keep a buffer for each micro-batch, and take the one that the gradient belongs to", 334),
    GradientHypothesis("micro-batches-in-another-order", "data", _in_another_order,
        "not a known combination, and ranks took the micro-batches of a step in different orders",
        "split a batch, and count its micro-batches, in the same way on all stages", 30),
)  # fmt: skip
