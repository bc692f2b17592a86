"""Wrong exchanges between ranks that hold a model together, or that see the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, combinations

import torch
from torch import Tensor, nn

from plumbline.judge.causes.combinations import clip_factor, mean, scaled
from plumbline.judge.causes.held_parts import HeldParts, block_of, mean_over
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase, multiplied
from plumbline.judge.hypothesis import holds, register
from plumbline.judge.oracle.noise import norm
from plumbline.judge.oracle.oracle import mean_gradient
from plumbline.judge.truth import Combination, SomeParameters, Weight


def _sizes(case: OracleGradientCase) -> list[int]:
    """Return the numbers of ranks that compute with the same samples: along each mesh dimension, and in total."""
    cell = case.analysis.cell
    if cell.parallelism.has_stages:
        return []
    ranks = cell.parallelism.replicas(cell.topology)[0]
    mesh = cell.parallelism.mesh(cell.topology)
    along = [{name: at for name, at in mesh.coordinates(rank).items() if at} for rank in ranks]
    names = {name for at in along for name in at}
    return sorted({len(ranks), *(size for name, size in mesh.dimensions if name in names)} - {1})


def _partial_sums(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None or case.in_stages:  # stages share only tied weights, which have their own causes
        return
    held = HeldParts(case)
    unlike = list(held.unlike())
    for factor in (1, len(case.recorded)) if unlike else ():
        parts = {name: factor * case.expected.raw[name] - sum(others) for name, _, others in unlike}
        yield {**case.expected.raw, **parts}


def _shards_of_some_ranks(case: OracleGradientCase) -> Gradients:
    held, cell = HeldParts(case), case.analysis.cell
    mesh = cell.parallelism.mesh(cell.topology)
    if case.clip_norm is not None or not held.in_blocks or case.world == 1:
        return
    for along in chain.from_iterable(combinations(mesh.names, count) for count in range(len(mesh.names))):
        group_of = {rank: group for group in mesh.groups(*along) for rank in group}
        parts = {rank: mean_over(case, group_of[rank]) for rank in held.siblings}
        yield held.assembled(parts, case.expected.raw)


def _blocks_averaged(case: OracleGradientCase) -> Gradients:
    held = HeldParts(case)
    if case.clip_norm is not None or not held.in_blocks:
        return
    for base in (case.expected.raw, mean_gradient(case.own_parts(case.rank))):
        total = {name: base.get(name, torch.zeros_like(right)).clone() for name, right in case.expected.raw.items()}
        for name, value in total.items():
            blocks = [block_of(value, index) for index in held.blocks_of(name).values()]
            if len({block.shape for block in blocks}) == 1:
                average = torch.stack(blocks).mean(0)
                for block in blocks:
                    block.copy_(average)
        yield total


def _some_tensors_scaled(case: OracleGradientCase) -> Gradients:
    """Predict one factor, a small integer or its inverse, for the tensors that it brings nearer to the observed."""
    if case.batch_parts > 1:  # hypotheses about pipeline stages are more specific
        return
    for count in range(2, 2 * len(case.analysis.recorded.ranks) + 1):
        for factor in (count, 1 / count):
            yield from case.with_nearer(scaled(factor, case.expected.raw))


def _partly_averaged(case: OracleGradientCase) -> Gradients:
    """Predict that some micro-batches are averaged only over the ranks along some dimensions of the mesh."""
    cell = case.analysis.cell
    mesh, analysis = cell.parallelism.mesh(cell.topology), case.analysis
    if case.clip_norm is not None or case.world == 1 or case.micro_batches == 1:
        return
    for along in chain.from_iterable(combinations(mesh.names, count) for count in range(1, len(mesh.names))):
        group = next(group for group in mesh.groups(*along) if HeldParts(case).first in group)
        own = {analysis.judged_as(rank) if case.is_staged else rank for rank in group}
        for index in range(case.micro_batches):
            for only in (True, False):
                yield from case.predicted(Combination(_partly(own, case.world / len(own), index, only)))


def _partly(ranks: set[int], factor: float, place: int, only: bool) -> Weight:
    return lambda r, b, n: factor * (r in ranks) if (b == place) == only else 1.0


def _added_again(case: OracleGradientCase) -> Gradients:
    """Predict that the sum so far is added over ranks with the same samples after every micro-batch."""
    for size in _sizes(case) if case.micro_batches > 1 else ():
        for base in (float(size), 1 / size):
            for least in (0, 1, -1):
                again = Combination(lambda r, b, n, base=base, least=least: base ** (n - 1 - b + least))  # type: ignore[misc]
                yield from case.predicted(again)
                yield from case.predicted(SomeParameters(again))


def _counted_again(case: OracleGradientCase) -> Gradients:
    held = HeldParts(case)
    if case.clip_norm is None or not held.in_blocks:
        return
    raw = case.expected.raw
    divided = sum(norm(raw[name]) ** 2 for name in raw if held.blocks_of(name))
    whole = sum(norm(raw[name]) ** 2 for name in raw if not held.blocks_of(name))
    ranks, siblings = len(case.analysis.recorded.ranks), len(held.siblings)
    for replicas in {1, ranks // siblings}:
        for copies in {1, siblings} | ({siblings * replicas} if replicas > 1 else set()):
            for times in {(replicas, copies), (replicas, replicas * copies)} - {(1, 1)}:
                size = math.sqrt(times[0] * divided + times[1] * whole)
                yield scaled(clip_factor(case.clip_norm, size), raw)


def _places_of_ranks(case: OracleGradientCase, length: int) -> Iterator[list[list[Tensor]]]:
    """Yield the ways to divide a sequence: the places of each rank, piece by piece."""
    every, pieces = torch.arange(length), case.analysis.cell.parallelism.sequence_pieces or 1
    for size in _sizes(case):
        for parts in (every.chunk(size * pieces), every.tensor_split(size * pieces)):
            if len(parts) != size * pieces:
                continue
            yield [[part] for part in parts] if pieces == 1 else [[parts[r], parts[-1 - r]] for r in range(size)]


def _masks(case: OracleGradientCase) -> Iterator[tuple[str, Tensor]]:
    columns = case.analysis.oracle.data.columns
    yield from ((name, column) for name, column in columns.items() if column.dtype == torch.bool and column.dim() == 2)


def _parts_of_sequences(case: OracleGradientCase) -> Gradients:
    """Predict the mean of the parts' means, where ranks have parts of sequences and a column masks tokens."""
    for name, column in _masks(case):
        for ranks in _places_of_ranks(case, column.shape[1]):
            places = torch.arange(column.shape[1])
            masks = [column & torch.isin(places, torch.cat(own)) for own in ranks if any(map(len, own))]
            if all(bool(mask.any()) for mask in masks):
                parts = [case.counterfactuals.with_column(case.index, name, mask) for mask in masks]
                yield case.clipped(mean(parts))


def _seams_missing(case: OracleGradientCase) -> Gradients:
    """Predict a loss without the last token of each piece but the last one."""
    for name, column in _masks(case):
        for ranks in _places_of_ranks(case, column.shape[1]):
            ends = sorted(int(piece[-1]) for own in ranks for piece in own if len(piece))[:-1]
            mask = column.clone()
            mask[:, ends] = False
            if bool(mask.any()) and ends:
                made = case.counterfactuals.with_column(case.index, name, mask)
                yield from case.if_wrong(case.clipped(made))


@contextmanager
def _renumbered(model: nn.Module, otherwise: Callable[[Tensor], Tensor]) -> Iterator[list[nn.Module]]:
    """Give other numbers to the embeddings that get the positions 0, 1, ...; yield the embeddings found."""
    found: list[nn.Module] = []

    def renumber(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        (positions,) = args
        every = torch.arange(positions.shape[-1] if positions.dim() else 0)
        if not len(every) or not bool((positions == every).all()):
            return None
        found.append(layer)
        return (otherwise(every).expand_as(positions),)

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]
    handles = [layer.register_forward_pre_hook(renumber) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _with_positions(case: OracleGradientCase, renumber: Callable[[Tensor], Tensor]) -> Gradients:
    """Predict that position embeddings number the positions 0, 1, ... in another way, if the model has any."""
    with case.counterfactuals.at(case.index) as oracle, _renumbered(oracle.model, renumber) as done:
        gradient = mean_gradient(oracle.group_gradients(case.layout))
    if done:
        yield case.clipped(gradient)


def _positions_again(case: OracleGradientCase) -> Gradients:
    for size in _sizes(case):
        for way in ("chunk", "tensor_split"):
            yield from _with_positions(case, _from_zero(way, size))


def _from_zero(way: str, count: int) -> Callable[[Tensor], Tensor]:
    return lambda every: torch.cat([torch.arange(len(part)) for part in getattr(every, way)(count)])


def _positions_of_other_places(case: OracleGradientCase) -> Gradients:
    """Predict that each rank numbers its pieces as one run: from zero, or as if it had one contiguous part."""
    for parts in ("from zero", "in order") if case.analysis.cell.parallelism.sequence_pieces else ():
        yield from _with_positions(case, _in_one_run(case, parts == "from zero"))


def _in_one_run(case: OracleGradientCase, from_zero: bool) -> Callable[[Tensor], Tensor]:
    def renumbered(every: Tensor) -> Tensor:
        positions = every.clone()
        for ranks in list(_places_of_ranks(case, len(every)))[-1:]:
            runs = every.tensor_split(len(ranks))
            for own, run in zip(ranks, runs, strict=True):
                places = torch.cat(own)
                if from_zero or len(run) == len(places):
                    positions[places] = torch.arange(len(places)) if from_zero else run
        return positions

    return renumbered


register(
    OracleGradientCase,
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
        "count copies once: add the squared norms of different blocks, and take the root", 559),
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
    GradientHypothesis("some-micro-batches-not-synchronised", "sync", _partly_averaged,
        "averaged over all ranks for some of {micro_batches} micro-batches, and over only some ranks for others",
        "add micro-batches before they are reduced along the last dimension of the mesh, not after it", 319.2),
    GradientHypothesis("reduced-with-every-micro-batch", "accumulation", _added_again,
        "added again, with every micro-batch, over the ranks that compute with the same samples",
        "reduce once a step, after the last backward pass: earlier sums are added again", 314),
    GradientHypothesis("tokens-at-seams-missing", "data", _seams_missing,
        "those of a loss without the last token of each piece of a sequence",
        "shift labels before sequences are divided, so that the last token of a piece has its label", 474),
    GradientHypothesis("positions-of-other-places", "data", _positions_of_other_places,
        "those of a training in which the tokens of a rank's pieces have the positions of other tokens",
        "divide positions as tokens are divided, into an early and a late piece for each rank", 204),
    GradientHypothesis("positions-from-zero", "data", _positions_again,
        "those of a training in which each part of a sequence is numbered from zero",
        "add the first position of the rank's part to its positions", 205),
    GradientHypothesis("unlike-within-a-replica", "sync",
        holds(lambda case: any(True for _ in HeldParts(case).unlike())),
        "wrong, and different on ranks that see the same samples, for parameters that each of them holds whole",
        "check whether activations or their gradients are parts of a sum that is not taken over these ranks", 98),
    GradientHypothesis("exchanged-otherwise", "sync",
        holds(lambda case: case.pattern.every_step and not case.pattern.only_scaled and bool(_sizes(case))),
        "not a known combination of the samples' gradients, and several ranks compute each sample together",
        "check what ranks exchange in the forward, and that each gradient returns to the rank that it belongs to", 5),
)  # fmt: skip
