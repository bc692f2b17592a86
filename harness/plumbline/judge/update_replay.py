"""Replays a rank's optimizer steps: the workload's optimizer, applied to the rank's own gradients.

A rank may also step its block of every parameter as if it were a whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from plumbline.core.precision import Precision
from plumbline.evidence.trace import RankTrace, Step, Tensors
from plumbline.judge.oracle.noise import Deviation, PartialSums, distance, in_noise, largest, limit, rounding_unit
from plumbline.judge.oracle.oracle import Optimizers, Oracle
from plumbline.judge.trace_analysis import TraceAnalysis

Intervention = Callable[[int, Oracle, Optimizers], None]
"""A change to a replay, made before the step with this index."""

PARTS = (2, 3, 4)
"""The numbers of parts in which an optimizer's matrix products are summed if updates are wrong without parts."""


def update_errors(trace: RankTrace, analysis: TraceAnalysis, allowed: float) -> list[Deviation]:
    """Return the error of each parameter after each step taken, compared with a replay of the optimizer.

    If an error is larger than ``allowed``, noise includes the effect of summing the optimizer's matrix products in
    parts: with sharded matrices, an optimizer that multiplies in 16 bits, as Muon does, rounds differently.
    """
    errors = list(replay(trace, analysis))
    if largest(errors).x_noise <= allowed:
        return errors
    return list(replay(trace, analysis, noise_of_parts=_noise_of_parts(trace, analysis)))


def may_sum_in_parts(trace: RankTrace, analysis: TraceAnalysis, allowed: float) -> bool:
    """Say whether updates are right only because an optimizer may add up matrix products in parts."""
    held = analysis.cell.parallelism.holders(analysis.cell.topology)
    return any(len(group) > 1 for group in held) and largest(replay(trace, analysis)).x_noise > allowed


def replay(
    trace: RankTrace,
    analysis: TraceAnalysis,
    intervene: Intervention | None = None,
    noise_of_parts: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Deviation]:
    """Yield the error of each parameter after each step taken, compared with the optimizer's step in float64.

    Each step begins with the rank's own weights, so that only the optimizer's state comes from the replay. Noise is the
    error of the same replay in the precision of the weights that are stepped, and at least one rounding;
    ``noise_of_parts``, a number of roundings, is added to it.
    """
    for step in replays(trace, analysis, (None, analysis.cell.arithmetic), (None, None), intervene):
        exact, replayed = step.weights
        for name, value in step.recorded.after.items():
            if name not in exact:
                continue  # the subject's own addition to the model: not the job's, so not judged
            unit = step.unit(name, analysis)
            noise = max(unit, distance(replayed[name], exact[name])) + noise_of_parts.get(name, 0.0) * unit
            yield Deviation(
                in_noise(distance(value, exact[name]), noise), step.index, name, analysis.holder(trace.rank, name)
            )


def _noise_of_parts(trace: RankTrace, analysis: TraceAnalysis) -> dict[str, float]:
    """Return the largest effect of sums in parts on each parameter over all steps, as a number of roundings."""
    roundings: dict[str, float] = {}
    precisions = (None, *[analysis.cell.arithmetic] * (1 + len(PARTS)))
    for step in replays(trace, analysis, precisions, (None, None, *PARTS)):
        _, whole, *others = step.weights
        for name, value in whole.items():
            made = max(distance(other[name], value) for other in others)
            unit = step.unit(name, analysis)
            roundings[name] = max(roundings.get(name, 0.0), made / unit if unit else 0.0)
    return roundings


@dataclass(frozen=True)
class StepReplays:
    """A step that a rank took, and the weights after it in each replay; the first one is exact."""

    index: int
    recorded: Step
    weights: Sequence[Tensors]

    def unit(self, name: str, analysis: TraceAnalysis) -> float:
        """Return the size of one rounding of a parameter and of its change."""
        before = self.recorded.before[name].double()
        return rounding_unit([before, self.weights[0][name] - before], analysis.weight_epsilon)


def replays(
    trace: RankTrace,
    analysis: TraceAnalysis,
    precisions: Sequence[Precision | None],
    parts: Sequence[int | None],
    intervene: Intervention | None = None,
) -> Iterator[StepReplays]:
    """Yield each step taken, replayed in each of ``precisions``, with matrix products in that many of ``parts``."""
    oracles = [Oracle(analysis.workload, analysis.devices, precision) for precision in precisions]
    replays = [(oracle, oracle.optimizer(), count) for oracle, count in zip(oracles, parts, strict=True)]
    for index, step in enumerate(trace.steps):
        if step.skipped:
            continue
        if intervene is not None:
            for oracle, optimizer, _ in replays:
                intervene(index, oracle, optimizer)
        weights = [
            weights_after(oracle, optimizer, step.before, step.gradients, step.learning_rates, count)
            for oracle, optimizer, count in replays
        ]
        yield StepReplays(index, step, weights)


def weights_after(
    oracle: Oracle,
    optimizer: Optimizers,
    before: Tensors,
    gradients: Tensors,
    learning_rates: tuple[float, ...],
    parts: int | None = None,
) -> Tensors:
    """Return the weights after one optimizer step from weights and gradients, at the subject's learning rates.

    The optimizer's matrix products are summed in ``parts``, if given.
    """
    oracle.load(before)
    oracle.set_gradients(gradients)
    set_rates(optimizer, learning_rates)
    with nullcontext() if parts is None else PartialSums(parts):
        optimizer.step()
    return oracle.weights()


def set_rates(optimizer: Optimizers, learning_rates: Sequence[float]) -> None:
    """Set the rates of all groups. Rates of another number are ignored: another check judges them."""
    if len(learning_rates) == len(optimizer.param_groups):
        for group, rate in zip(optimizer.param_groups, learning_rates, strict=True):
            group["lr"] = rate


WAYS = (torch.chunk, torch.tensor_split)
"""The ways to divide a parameter into blocks: as FSDP2 and DTensor do, and as evenly as possible."""


def stepped_shard_by_shard(trace: RankTrace, analysis: TraceAnalysis) -> bool:
    """Say whether steps of the optimizer on separate blocks explain every update, and steps on whole parameters do not.

    At every step, each parameter must match the update by blocks within the rounding of one device, which does not sum
    matrix products in parts. For at least one parameter, the update by blocks must differ from that of the whole.
    """
    sizes = {len(group) for group in analysis.cell.parallelism.holders(analysis.cell.topology)} - {1}
    ways = [(way, dim, size) for way in WAYS for dim in (0, 1) for size in sizes]
    steps = list(replays(trace, analysis, (None, analysis.cell.arithmetic), (None, None))) if ways else []
    return any(_fits(steps, analysis, _Blocks(analysis, way, dim, size)) for way, dim, size in ways)


def _fits(steps: Sequence[StepReplays], analysis: TraceAnalysis, blocks: _Blocks) -> bool:
    differs = False
    for step in steps:
        exact, replayed = step.weights
        alone = blocks.after(step.recorded)
        for name, value in step.recorded.after.items():
            if name in exact:
                noise = max(step.unit(name, analysis), distance(replayed[name], exact[name]))
                if in_noise(distance(value, alone[name]), noise) > limit():
                    return False
                differs |= in_noise(distance(alone[name], exact[name]), noise) > limit()
    return differs


class _Blocks:
    """One optimizer per rank, which steps the rank's block of every parameter, in the precision of the weights."""

    def __init__(self, analysis: TraceAnalysis, way: object, dim: int, size: int) -> None:
        self._way, self._dim, self._size = way, dim, size
        stepped: torch.dtype = getattr(torch, analysis.cell.arithmetic.stepped)
        self._whole = {name: value.to(stepped).clone() for name, value in analysis.start.items()}
        split = {name: self._split(value) for name, value in self._whole.items()}
        self._parts = [{n: nn.Parameter(blocks[r]) for n, blocks in split.items() if r < len(blocks)}
                       for r in range(size)]  # fmt: skip
        names = {id(parameter): name for name, parameter in analysis.oracle.stepped.items()}
        self._optimizers = [analysis.oracle.optimizer() for _ in self._parts]
        for part, optimizer in zip(self._parts, self._optimizers, strict=True):
            for group in optimizer.param_groups:  # empty if the rank has no block of its parameters
                group["params"] = [part[name] for p in group["params"] if (name := names[id(p)]) in part]

    def after(self, step: Step) -> Tensors:
        with torch.no_grad():
            for rank, name, block in self._each():
                block.copy_(self._split(step.before[name])[rank])
                gradient = step.gradients.get(name)
                block.grad = None if gradient is None else self._split(gradient.to(block.dtype))[rank].clone()
        for optimizer in self._optimizers:
            set_rates(optimizer, step.learning_rates)
            optimizer.step()
        return {name: value.double() for name, value in self._whole.items()}

    def _each(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        for rank, part in enumerate(self._parts):
            for name, block in part.items():
                yield rank, name, block

    def _split(self, value: Tensor) -> Sequence[Tensor]:
        if value.dim() <= self._dim:
            return (value,)
        blocks: Sequence[Tensor] = self._way(value, self._size, self._dim)  # type: ignore[operator]
        return blocks
