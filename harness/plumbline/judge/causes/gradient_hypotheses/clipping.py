"""Clipping at the wrong time, by the wrong norm, or by one that was combined wrongly from the ranks' parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations

from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import clip_factor, factor_between, mean, scaled
from plumbline.judge.causes.held_parts import HeldParts, on_stages, own_experts
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import register
from plumbline.judge.oracle.noise import length
from plumbline.judge.oracle.oracle import clipped, mean_gradient


def _before_unscaling(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None and case.step.scale:
        yield clipped(case.expected.raw, case.clip_norm / case.step.scale)


def _before_averaging(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None and case.world > 1:
        ranks = [case.clipped(mean_gradient(own)) for rank in range(case.world) if (own := case.own_parts(rank))]
        yield mean_gradient([ranks])


def _every_micro_batch(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None and case.micro_batches > 1:
        yield mean_gradient([[case.clipped(mean_gradient([groups]))] for groups in case.expected.parts])
        yield mean_gradient([[case.clipped(part) for part in groups] for groups in case.expected.parts])


def _tensor_by_tensor(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None:
        yield {name: value for n, v in case.expected.raw.items() for name, value in case.clipped({n: v}).items()}


def _by_value(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None:
        limit = case.clip_norm
        yield {name: value.clamp(-limit, limit) for name, value in case.expected.raw.items()}


def _to_another_length(case: OracleGradientCase) -> Gradients:
    factor = factor_between(case.expected.raw, case.observed, default=0.0)
    if case.clip_norm is not None and factor > 0:
        yield scaled(min(factor, 1.0), case.expected.raw)


def _in_groups(case: OracleGradientCase) -> Gradients:
    """Predict the right direction of each tensor with its observed length; clipping never makes it longer."""
    if case.clip_norm is None:
        return
    total = {}
    for name, right in case.expected.raw.items():
        square = float((right * right).sum())
        factor = float((case.observed[name] * right).sum()) / square if square else 0.0
        if factor < 0:
            return
        total[name] = min(factor, 1.0) * right
    yield total


def _unasked(case: OracleGradientCase) -> Gradients:
    """Predict one clipping limit for all wrong gradients, or one for each rank's share."""
    # At a single step, any factor below 1 could come from a clipping limit.
    if case.clip_norm is None and (case.pattern.steps > 1 or not case.pattern.every_step):
        yield clipped(case.expected.raw, case.pattern.clip_limit)
        if case.pattern.clip_limits and min(case.pattern.clip_limits) > 0:
            (parts,) = case.expected.parts
            yield mean([clipped(part, limit) for part, limit in zip(parts, case.pattern.clip_limits, strict=True)])


register(
    OracleGradientCase,
    GradientHypothesis("clipped-before-unscaling", "clipping", _before_unscaling,
        "clipped while they were still multiplied by the loss scale of {scale}",
        "call scaler.unscale_(optimizer) before clipping", 990),
    GradientHypothesis("not-clipped", "clipping", lambda case: [] if case.clip_norm is None else [case.expected.raw],
        "not clipped",
        "clip before the step", 580),
    GradientHypothesis("clipped-before-averaging", "clipping", _before_averaging,
        "the mean of gradients that each rank clipped by itself",
        "clip after the all-reduce", 570),
    GradientHypothesis("clipped-every-micro-batch", "clipping", _every_micro_batch,
        "the mean of micro-batches that were clipped one by one",
        "clip once, when the window is complete", 560),
    GradientHypothesis("clipped-to-another-length", "clipping", _to_another_length,
        "right in direction but not in length",
        "compare the norm, limit and tensors that clipping uses with the workload's, on every rank", 550),
    GradientHypothesis("clipped-tensor-by-tensor", "clipping", _tensor_by_tensor,
        "clipped tensor by tensor",
        "clip by the norm of all gradients together", 540),
    GradientHypothesis("clipped-by-value", "clipping", _by_value,
        "clipped entry by entry",
        "clip by norm (clip_grad_norm_), not by value (clip_grad_value_)", 520),
    GradientHypothesis("clipped-although-nobody-asked", "clipping", _unasked,
        "clipped to a norm, although the workload does not clip",
        "check whether the trainer clips by default", 95),
    GradientHypothesis("clipped-in-groups", "clipping", _in_groups,
        "right in direction tensor by tensor, but each tensor is scaled by a different factor",
        "clip by the norm of all gradients together, so that one factor scales them all", 93),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class HeldNorms:
    """The gradient on each of the ranks that hold one model together: the rank's own parts, and those that all have."""

    case: OracleGradientCase

    @cached_property
    def held(self) -> HeldParts:
        return HeldParts(self.case)

    @cached_property
    def experts(self) -> dict[str, int]:
        return {} if self.case.is_staged else own_experts(self.case)

    @cached_property
    def own(self) -> Mapping[int, Tensors]:
        """The parts that only one rank has, by rank; empty if all ranks hold the same."""
        raw = self.case.expected.raw
        if self.case.in_stages:
            return on_stages(self.case)
        if self.held.in_blocks:
            blocks = {r: self.held.blocks_on(r, raw) for r in self.held.siblings}
            return {r: {str(number): block for number, block in enumerate(own)} for r, own in blocks.items()}
        ranks = sorted(set(self.experts.values()))
        return {rank: {n: raw[n] for n, holder in self.experts.items() if holder == rank} for rank in ranks}

    @cached_property
    def common(self) -> Tensors:
        """The parts that every rank has."""
        raw = self.case.expected.raw
        if self.case.in_stages:
            return {}
        return {
            name: value for name, value in raw.items() if not self.held.blocks_of(name) and name not in self.experts
        }

    def squared(self, rank: int) -> float:
        return length(self.own[rank]) ** 2

    @property
    def common_squared(self) -> float:
        return length(self.common) ** 2

    def norm_on(self, rank: int) -> float:
        return math.sqrt(self.squared(rank) + self.common_squared)

    def clipped_by(self, size: float) -> Tensors:
        """Return the gradient as clipped by a wrong norm."""
        return scaled(clip_factor(self.case.clip_norm, size), self.case.expected.raw)

    def clipped_by_each(self, sizes: Mapping[int, float]) -> Tensors:
        """Return the gradient with each rank's parts clipped by that rank's norm in ``sizes``."""
        parts = {rank: self.clipped_by(size) for rank, size in sizes.items()}
        raw = self.case.expected.raw
        if self.case.in_stages:
            return {name: parts[self.case.held.holders[name][0]][name] for name in raw}
        if self.held.in_blocks:
            return self.held.assembled(parts, raw)
        own = self.case.rank if self.case.rank in parts else min(parts)
        return {name: parts[self.experts.get(name, own)][name] for name in raw}


def _clipping(predict: Callable[[HeldNorms], Iterator[Tensors]]) -> Callable[[OracleGradientCase], Gradients]:
    """Return the prediction, made only if gradients are clipped and several ranks have parts of their own."""

    def predict_clipped(case: OracleGradientCase) -> Gradients:
        norms = HeldNorms(case)
        if case.clip_norm is not None and len(norms.own) > 1:
            yield from predict(norms)

    return predict_clipped


def _left_out(norms: HeldNorms) -> Iterator[Tensors]:
    """Predict a norm of the common parts only, of the ranks' own parts only, or of all parts but one rank's own."""
    every = sum(map(norms.squared, norms.own))
    if norms.common_squared:
        yield norms.clipped_by(math.sqrt(norms.common_squared))
        yield norms.clipped_by(math.sqrt(every))
    for rank in norms.own:
        yield norms.clipped_by(math.sqrt(max(0.0, every - norms.squared(rank)) + norms.common_squared))


def _combined_otherwise(combine: Callable[[list[float]], float]) -> Callable[[HeldNorms], Iterator[Tensors]]:
    def predict(norms: HeldNorms) -> Iterator[Tensors]:
        yield norms.clipped_by(combine([norms.norm_on(rank) for rank in norms.own]))
        yield norms.clipped_by(
            math.hypot(combine([math.sqrt(norms.squared(r)) for r in norms.own]), length(norms.common))
        )

    return predict


def _mean(sizes: list[float]) -> float:
    return sum(sizes) / len(sizes)


def _on_each_rank(case: OracleGradientCase) -> Gradients:
    """Predict one factor for each rank: by the norm of its parts, or any factor if ranks hold blocks of tensors."""
    yield from _clipping(_by_own_norms)(case)
    held = HeldParts(case)
    if case.clip_norm is None or not held.in_blocks:
        return
    parts = {}
    for rank in held.siblings:
        factor = factor_between(held.on(rank, case.expected.raw), held.on(rank, case.observed), default=0.0)
        if factor < 0:
            return
        parts[rank] = scaled(factor, case.expected.raw)
    yield held.assembled(parts, case.expected.raw)


def _by_own_norms(norms: HeldNorms) -> Iterator[Tensors]:
    yield norms.clipped_by_each({rank: norms.norm_on(rank) for rank in norms.own})


def _along_a_dimension(norms: HeldNorms) -> Iterator[Tensors]:
    """Predict that the ranks' squared norms are added along only some dimensions of the mesh."""
    cell = norms.case.analysis.cell
    mesh = cell.parallelism.mesh(cell.topology)
    everyone = norms.held.siblings if norms.held.in_blocks else ()
    first = {rank: mesh.coordinates(rank) for rank in everyone}
    for along in chain.from_iterable(combinations(mesh.names, count) for count in range(1, len(mesh.names))):
        group_of = {rank: group for group in mesh.groups(*along) for rank in group}
        sums = {rank: sum(_squares_like(norms, other, first) for other in group_of[rank]) for rank in everyone}
        for times in {1, len(group_of[norms.held.first])} if everyone else ():
            yield norms.clipped_by_each({r: math.sqrt(sums[r] + times * norms.common_squared) for r in everyone})


def _squares_like(norms: HeldNorms, rank: int, siblings: Mapping[int, Mapping[str, int]]) -> float:
    """Return a rank's squared norm; a rank of another replica has that of the corresponding sibling."""
    if rank in siblings:
        return norms.squared(rank)
    cell = norms.case.analysis.cell
    along = cell.parallelism.mesh(cell.topology).coordinates(rank)
    shared = _varying(siblings)
    return next(
        (norms.squared(one) for one, at in siblings.items() if all(at[name] == along[name] for name in shared)), 0.0
    )


def _varying(siblings: Mapping[int, Mapping[str, int]]) -> set[str]:
    names = next(iter(siblings.values())).keys()
    return {name for name in names if len({at[name] for at in siblings.values()}) > 1}


register(
    OracleGradientCase,
    GradientHypothesis("left-out-of-the-norm", "clipping", _clipping(_left_out),
        "clipped by a norm that leaves out a part of the model: what only some ranks hold, or what all of them hold",
        "add the squared norms of all parameters (sharded, replicated and experts), each once", 552),
    GradientHypothesis("norms-averaged", "clipping", _clipping(_combined_otherwise(_mean)),
        "clipped by the mean of the norms of what each rank holds",
        "add the squared norms over the ranks that hold different parts, and do not average norms", 555),
    GradientHypothesis("norms-added", "clipping", _clipping(_combined_otherwise(sum)),
        "clipped by the sum of the norms of what each rank holds",
        "add the squared norms over ranks, and take the root of their sum", 554),
    GradientHypothesis("largest-norm-only", "clipping", _clipping(_combined_otherwise(max)),
        "clipped by the largest of the norms of what each rank holds",
        "add the squared norms over ranks, and take the root of their sum", 553),
    GradientHypothesis("norm-of-some-shards", "clipping", _clipping(_along_a_dimension),
        "clipped on each rank by a norm that was added along only some dimensions of the mesh",
        "add the squared norms over all ranks that hold different parts, and over no others", 535),
    GradientHypothesis("clipped-shard-by-shard", "clipping", _on_each_rank,
        "clipped on each rank by a norm of its own: what each rank holds is scaled by a different factor",
        "clip by the norm of all shards together: all-reduce the squared norms of sharded parameters over their ranks "
        "before taking the root, as clip_grad_norm_ does with DTensors", 530),
)  # fmt: skip
