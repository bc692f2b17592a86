"""Wrong exchanges between ranks that hold a model together, or that see the same samples."""

from __future__ import annotations

import math
from itertools import chain, combinations

import torch

from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import CONCLUSIVE, factor_between, mean, scaled
from plumbline.judge.causes.held_parts import HeldParts
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase, multiplied
from plumbline.judge.hypothesis import holds, register
from plumbline.judge.oracle.noise import norm
from plumbline.judge.oracle.oracle import clipped, mean_gradient


def _sizes(case: OracleGradientCase) -> list[int]:
    """Return the numbers of ranks that compute with the same samples: along each dimension of the mesh, and in all."""
    cell = case.counterfactuals.cell
    if cell.contract.has_stages:
        return []
    ranks = cell.contract.replicas(cell.topology)[0]
    mesh = cell.contract.mesh(cell.topology)
    along = [{name: at for name, at in mesh.coordinates(rank).items() if at} for rank in ranks]
    names = {name for at in along for name in at}
    return sorted({len(ranks), *(size for name, size in mesh.dimensions if name in names)} - {1})


def _partial_sums(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None or case.in_stages:  # stages share only tied weights, which have their own causes
        return
    held = HeldParts(case)
    unlike = list(held.unlike())
    for factor in (1, len(held.members)) if unlike else ():
        parts = {name: factor * case.expected.raw[name] - sum(others) for name, _, others in unlike}
        yield {**case.expected.raw, **parts}


def _data_rank(case: OracleGradientCase, rank: int) -> int:
    return next(place for place, group in enumerate(case.counterfactuals.analysis.replicas) if rank in group)


def _mean_over(case: OracleGradientCase, ranks: tuple[int, ...]) -> Tensors:
    shares = sorted({_data_rank(case, rank) for rank in ranks})
    return mean_gradient([[groups[share] for share in shares if share < len(groups)] for groups in case.expected.parts])


def _shards_of_some_ranks(case: OracleGradientCase) -> Gradients:
    held, cell = HeldParts(case), case.counterfactuals.cell
    mesh = cell.contract.mesh(cell.topology)
    if case.clip_norm is not None or not held.in_blocks or case.world == 1:
        return
    for along in chain.from_iterable(combinations(mesh.names, count) for count in range(len(mesh.names))):
        group_of = {rank: group for group in mesh.groups(*along) for rank in group}
        parts = {rank: _mean_over(case, group_of[rank]) for rank in held.siblings}
        yield held.assembled(parts, case.expected.raw)


def _blocks_averaged(case: OracleGradientCase) -> Gradients:
    held = HeldParts(case)
    if case.clip_norm is not None or not held.in_blocks:
        return
    for base in (case.expected.raw, mean_gradient(case.own_parts(case.rank))):
        total = {name: base.get(name, torch.zeros_like(right)).clone() for name, right in case.expected.raw.items()}
        for name, value in total.items():
            indices = held.blocks_of(name).values()
            blocks = [value[index] for index in indices]
            if len({block.shape for block in blocks}) == 1:
                average = torch.stack(blocks).mean(0)
                for index in indices:
                    value[index] = average
        yield total


def _own_experts(case: OracleGradientCase) -> dict[str, int]:
    """Return the rank of each parameter that only some of the ranks that hold a model together have."""
    cell = case.counterfactuals.cell
    (group,) = [ranks for ranks in cell.contract.holders(cell.topology) if HeldParts(case).first in ranks]
    recorded = case.counterfactuals.analysis.recorded_steps[case.index].ranks
    holders = {n: [rank for rank in group if n in recorded[rank].before] for n in case.expected.contract}
    return {name: ranks[0] for name, ranks in holders.items() if 0 < len(ranks) < len(group)}


def _of_holders_samples(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None or case.world == 1:
        return
    holders = _own_experts(case)
    parts = {rank: _mean_over(case, (rank,)) for rank in set(holders.values())}
    for factor in (1.0, 1 / case.world) if holders else ():
        own = {n: factor * parts[rank].get(n, torch.zeros_like(case.expected.raw[n])) for n, rank in holders.items()}
        yield {**case.expected.raw, **own}


def _rest_missing(case: OracleGradientCase) -> Gradients:
    if (experts := _own_experts(case)) and len(experts) < len(case.expected.contract):
        yield {name: value for name, value in case.expected.contract.items() if name in experts}


def _missing_elsewhere(case: OracleGradientCase) -> Gradients:
    missing = {name for name, value in case.observed.items() if not norm(value)}
    ranks = [step.gradients for step in case.ranks]
    if missing and all(any(name in own and norm(own[name]) for own in ranks) for name in missing):
        yield {name: value for name, value in case.expected.contract.items() if name not in missing}


def _some_tensors_scaled(case: OracleGradientCase) -> Gradients:
    """Predict one factor, a small number or its inverse, for the tensors that it brings nearer."""
    if case.batch_parts > 1:  # the stages of a pipeline say more
        return
    for count in range(2, 2 * len(case.counterfactuals.analysis.recorded.ranks) + 1):
        for factor in (count, 1 / count):
            yield from case.with_nearer(scaled(factor, case.expected.raw))


def _experts_scaled(case: OracleGradientCase) -> Gradients:
    total = dict(case.expected.raw)
    for name in _own_experts(case) if case.clip_norm is None else ():
        factor = factor_between({name: total[name]}, case.observed)
        if factor < 0 or total[name].numel() < CONCLUSIVE:
            return
        total[name] = factor * total[name]
    yield total


def _counted_again(case: OracleGradientCase) -> Gradients:
    held = HeldParts(case)
    if case.clip_norm is None or not held.in_blocks:
        return
    raw = case.expected.raw
    divided = sum(norm(raw[name]) ** 2 for name in raw if held.blocks_of(name))
    whole = sum(norm(raw[name]) ** 2 for name in raw if not held.blocks_of(name))
    ranks, siblings = len(case.counterfactuals.analysis.recorded.ranks), len(held.siblings)
    for replicas in {1, ranks // siblings}:
        for copies in {1, siblings} | ({siblings * replicas} if replicas > 1 else set()):
            for times in {(replicas, copies), (replicas, replicas * copies)} - {(1, 1)}:
                size = math.sqrt(times[0] * divided + times[1] * whole)
                yield scaled(min(1.0, case.clip_norm / (size + 1e-6)), raw)


def _parts_of_sequences(case: OracleGradientCase) -> Gradients:
    """Predict the mean of each part's mean, where ranks have parts of sequences that a column masks."""
    counterfactuals = case.counterfactuals
    for size in _sizes(case):
        for name, column in counterfactuals.analysis.oracle.data.columns.items():
            if column.dtype == torch.bool and column.dim() == 2:
                places = torch.arange(column.shape[1])
                for parts in (places.chunk(size), places.tensor_split(size)):
                    masks = [column & torch.isin(places, part) for part in parts if len(part)]
                    if all(bool(mask.any()) for mask in masks):
                        own = [counterfactuals.with_column(case.index, name, mask) for mask in masks]
                        yield clipped(mean(own), case.clip_norm)


def _positions_again(case: OracleGradientCase) -> Gradients:
    for size in _sizes(case):
        for gradient in case.counterfactuals.with_positions_in_parts(case.index, size):
            yield clipped(gradient, case.clip_norm)


register(
    OracleGradientCase,
    GradientHypothesis("nothing-but-experts-trained", "unused-params", _rest_missing,
        "right for parameters that only one rank holds, and zero or absent for those that all ranks hold",
        "check that the optimizer has the layers around the experts, and a backward reaches them on each rank", 958),
    GradientHypothesis("missing-where-another-rank-has-it", "unused-params", _missing_elsewhere,
        "right, but zero or absent on rank {rank} for parameters that have a gradient on another rank",
        "send an expert's gradient to every rank that holds it, before the step", 952),
    GradientHypothesis("parts-of-a-sum", "sync", _partial_sums,
        "rank {rank}'s part of a sum over ranks that see the same samples, for parameters that all of them hold",
        "sum the parts over the group before the step, and do not label partial gradients as replicated",
        697),
    GradientHypothesis("multiplied-by-ranks-of-the-same-samples", "loss-normalisation", multiplied(_sizes),
        "{factor} × the right ones, and this is a number of ranks that compute one loss together",
        "do not multiply the loss, or a sum over these ranks: they are not replicas", 653),
    GradientHypothesis("divided-by-ranks-of-the-same-samples", "loss-normalisation",
        multiplied(lambda case: [1 / size for size in _sizes(case)]),
        "{factor} × the right ones: divided by a number of ranks that compute one loss together",
        "divide by the number of replicas, not by the number of ranks: these ranks are not replicas", 652),
    GradientHypothesis("counted-again-in-the-norm", "clipping", _counted_again,
        "clipped by a norm in which some gradients count more than once",
        "count what several ranks hold alike once: add the norms of different blocks only", 559),
    GradientHypothesis("means-of-parts-averaged", "loss-normalisation", _parts_of_sequences,
        "the mean of the means over each rank's part of the sequences",
        "divide by the number of tokens over all parts, because parts have unequal numbers", 475),
    GradientHypothesis("some-tensors-scaled", "averaging", _some_tensors_scaled,
        "right for some parameters, and for others multiplied or divided by a small number",
        "check whether a group is counted twice, or divided by once too often", 349),
    GradientHypothesis("shards-averaged-over-some-ranks", "sync", _shards_of_some_ranks,
        "averaged over only some of the {world} ranks, for each rank's shard",
        "check over which dimension of the mesh the gradient is reduced", 332),
    GradientHypothesis("blocks-averaged-with-each-other", "sync", _blocks_averaged,
        "averaged over ranks that hold different blocks of a tensor",
        "check over which dimension of the mesh the gradient is reduced", 331),
    GradientHypothesis("of-the-holders-samples", "sync", _of_holders_samples,
        "right, but for parameters that only one rank holds they are those of that rank's samples",
        "include the gradient of what an expert computes for other ranks", 326),
    GradientHypothesis("positions-from-zero", "data", _positions_again,
        "those of a training in which each part of a sequence is numbered from zero",
        "add the first position of the rank's part to its positions", 205),
    GradientHypothesis("unlike-within-a-replica", "sync",
        holds(lambda case: any(True for _ in HeldParts(case).unlike())),
        "wrong, and different on ranks that see the same samples, for parameters that each of them holds whole",
        "check whether activations or their gradients are parts of a sum that is not taken over these ranks", 98),
    GradientHypothesis("experts-scaled", "averaging", _experts_scaled,
        "right, but for parameters that only one rank holds they are right in direction and not in length",
        "check what an expert's gradient is divided by: ranks, or the rows that use it", 33),
    GradientHypothesis("exchanged-otherwise", "sync",
        holds(lambda case: case.pattern.every_step and not case.pattern.only_scaled and bool(_sizes(case))),
        "not a known combination of the samples' gradients, and several ranks compute each sample together",
        "check what ranks exchange in the forward, and that its gradients return to where it came from", 5),
)  # fmt: skip
