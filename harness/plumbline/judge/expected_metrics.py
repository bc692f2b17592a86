"""The values of ``loss`` and ``val_loss`` that a trainer should have reported: means over samples.

``loss`` is a mean over samples that were trained on, each at the weights it was trained with; ``val_loss`` a mean
over the held-out samples at the weights of that time. Both are computed from *batch shares*: the part of one batch that
one rank computed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from plumbline.evidence.trace import Evaluation, Tensors
from plumbline.judge.oracle.layout import Layout, Position, contract_layout, draws, samples, shuffled, with_unique_draws
from plumbline.judge.oracle.noise import NOISE_RUNS, NoiseScale, in_noise, rounding_unit, within_a_rounding
from plumbline.judge.oracle.oracle import Oracle
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import Columns

TRAINING, HELD_OUT = "loss", "val_loss"
"""The names of the metrics that can be judged."""

REPORTED_IN = torch.finfo(torch.float32).eps
"""Loggers keep float32, in whatever precision the training computes."""

SAME_MEAN = 1e-9
"""The relative tolerance for equal means. In float64, two ways to compute the same mean differ by much less."""


@dataclass(frozen=True)
class BatchShare:
    """One rank's share of one batch: its samples and their mean loss, in float64."""

    step: int
    batch: int
    rank: int
    samples: tuple[int, ...]
    loss: float


BatchShares = tuple[BatchShare, ...]


@dataclass(frozen=True)
class LossMode:
    """How losses are evaluated: with weights from ``later`` steps after the right ones, and in training mode or not."""

    later: int
    training: bool


RIGHT = {TRAINING: LossMode(0, training=True), HELD_OUT: LossMode(0, training=False)}


@dataclass(frozen=True)
class ReportedValue:
    """One value that one rank reported; ``previous`` is the position of its last report of that name, None if first."""

    name: str
    value: float
    rank: int
    position: Position
    previous: Position | None

    @property
    def step(self) -> int:
        """The last step that had begun."""
        steps, micro_batches = self.position
        return steps if micro_batches else max(steps - 1, 0)


class LossTable:
    """The losses of one trace, by batch share. Float64; everything expensive is computed once."""

    def __init__(self, analysis: TraceAnalysis) -> None:
        self.analysis = analysis
        self.workload = analysis.workload
        self.oracle = analysis.oracle
        self.world = analysis.world
        self.batch_size = self.workload.global_batch_size(analysis.devices) // self.world
        self._trained: dict[LossMode, BatchShares] = {}
        self._each: dict[tuple[Position, LossMode, bool], torch.Tensor | None] = {}

    @cached_property
    def reports(self) -> tuple[ReportedValue, ...]:
        """The reported values that can be judged, by rank."""
        reports: list[ReportedValue] = []
        for trace in self.analysis.trace.ranks:
            last: dict[str, tuple[Position | None, Position]] = {}
            for logged in trace.logged:
                position = position_of(self.analysis, logged.step, logged.micro_batches, trace.rank)
                if logged.name not in RIGHT or not self._is_judgeable(logged.name, position):
                    continue
                before, latest = last.get(logged.name, (None, None))
                # Two reports at one position cover the same samples.
                previous = before if latest == position else latest
                last[logged.name] = (previous, position)
                reports.append(ReportedValue(logged.name, logged.value, trace.rank, position, previous))
        return tuple(reports)

    def _is_judgeable(self, name: str, position: Position) -> bool:
        if position[0] > len(self.analysis.steps) or name not in self.means_over_samples:
            return False
        if not self.noise[name].runs:
            return False  # every forward of one device overflows in this precision
        if name == TRAINING:
            # Optimizers that take turns have one loss each.
            return position > (0, 0) and not any(global_step.ranks[0].turns for global_step in self.analysis.steps)
        # Ranks may evaluate with buffers of their own, until the next training forward shares them.
        return self.world == 1 or not self.oracle.buffers

    @cached_property
    def means_over_samples(self) -> frozenset[str]:
        """The metrics that equal the mean of their samples' separate losses, by declaration or by a computed test."""
        if "metrics" in self.workload.needs:
            return frozenset(RIGHT)
        return frozenset(name for name in RIGHT if self._layouts and any(self._layouts[0]) and self._is_mean(name))

    def _is_mean(self, name: str) -> bool:
        first = self.analysis.steps[0]
        self.analysis.load_step(self.oracle, first)
        try:
            if name == TRAINING:
                # All samples of the step: the few of one rank can have equal weights by chance.
                everybody = draws(self._layouts[0])
                ((together,),) = self.oracle.losses((((tuple(everybody),),),))
                (each,) = self.oracle.losses((tuple(((i,),) for i in everybody),))
            else:
                buffers, everybody = first.ranks[0].buffers, list(range(len(self.held_out)))
                together, *each = (
                    self.oracle.evaluation_loss(self.held_out, chosen, buffers, training=False)
                    for chosen in (everybody, *([i] for i in everybody))
                )
        except ValueError:  # a layer that needs more than one sample
            return False
        mean = torch.stack(each).mean()
        return len(each) > 1 and bool((together - mean).abs() <= SAME_MEAN * mean.abs())

    @cached_property
    def held_out(self) -> Columns:
        """The held-out samples, in float64."""
        return self.oracle.held_out

    @cached_property
    def _layouts(self) -> list[Layout]:
        return [rank_layout(self.analysis, global_step.index) for global_step in self.analysis.steps]

    def weights(self, steps: int) -> Tensors | None:
        """Return the weights after ``steps`` steps; None if there were fewer."""
        done = self.analysis.steps
        if not 0 <= steps <= len(done):
            return None
        return done[steps].ranks[0].before if steps < len(done) else done[-1].ranks[0].after

    def _buffers(self, position: Position) -> Tensors:
        """Return the first rank's buffers at a position; within a window, as its forwards so far left them."""
        step, micro_batches = position
        if step >= len(self.analysis.steps):
            return self.analysis.trace.ranks[0].final_buffers
        first = self.analysis.steps[step].ranks[0]
        if not micro_batches or not first.buffers:
            return first.buffers
        shares = [
            micro.forwards[0]
            for micro in first.micro_batches[: micro_batches * self.analysis.cell.parallelism.micro_batches]
            if micro.forwards
        ]
        self.oracle.load(first.before)
        return self.oracle.buffers_after(first.buffers, shares)

    def trained(self, state: LossMode) -> BatchShares:
        """Return all batch shares that were trained on, in order, as far as their weights are known."""
        if state not in self._trained:
            self._trained[state] = self._train(state)
        return self._trained[state]

    def _train(self, state: LossMode) -> BatchShares:
        shares: list[BatchShare] = []
        for global_step in self.analysis.steps:
            weights = self.weights(global_step.index + state.later)
            if weights is None:
                continue
            self.analysis.load_step(self.oracle, global_step)
            self.oracle.load(weights)
            for rank in range(len(global_step.ranks)):
                layout = rank_layout(self.analysis, global_step.index, rank)
                if state.training:
                    losses = [float(loss) for (loss,) in self.oracle.losses(layout)]
                else:
                    data, buffers = self.oracle.data, global_step.ranks[0].buffers
                    batches = [samples((groups,)) for groups in layout]
                    losses = [float(self.oracle.evaluation_loss(data, i, buffers, training=False)) for i in batches]
                shares += [
                    BatchShare(global_step.index, batch, rank, tuple(samples((groups,))), loss)
                    for batch, (groups, loss) in enumerate(zip(layout, losses, strict=True))
                ]
        return tuple(sorted(shares, key=lambda share: (share.step, share.batch, share.rank)))

    def each(self, position: Position, state: LossMode, *, held_out: bool = True) -> torch.Tensor | None:
        """Return the separate loss of each held-out or each training sample; None if it cannot be computed."""
        key = (position, state, held_out)
        if key not in self._each:
            self._each[key] = self._one_by_one(position, state, self.held_out if held_out else self.oracle.data)
        return self._each[key]

    def _one_by_one(self, position: Position, state: LossMode, data: Columns) -> torch.Tensor | None:
        weights = self.weights(position[0] + state.later)
        if weights is None:
            return None
        buffers = self._buffers(position)
        self.oracle.load(weights)
        training, everybody = state.training, range(len(data))
        try:
            return torch.stack([self.oracle.evaluation_loss(data, [i], buffers, training=training) for i in everybody])
        except ValueError:  # a layer that needs more than one sample
            return None

    def evaluated(self, report: ReportedValue, state: LossMode) -> BatchShares:
        """Return the batch shares of the last evaluation before a report, with the samples as they were drawn."""
        losses = self.each(report.position, state)
        if losses is None:
            return ()
        ranks: list[Evaluation | None] = [
            next((e for e in reversed(trace.evaluations) if (e.step, e.micro_batches) <= report.position), None)
            for trace in self.analysis.trace.ranks
        ]
        latest = max(((e.step, e.micro_batches) for e in ranks if e is not None), default=None)
        shares = []
        for rank, found in enumerate(ranks):
            if found is None or (found.step, found.micro_batches) != latest:
                continue
            drawn = [i for i in found.samples if i < len(losses)]
            for batch, start in enumerate(range(0, len(drawn), self.batch_size)):
                chunk = tuple(drawn[start : start + self.batch_size])
                shares.append(BatchShare(report.step, batch, rank, chunk, float(losses[list(chunk)].mean())))
        return tuple(sorted(shares, key=lambda share: (share.batch, share.rank)))

    def windows(self, report: ReportedValue, state: LossMode) -> list[BatchShares]:
        """Return what the mean may cover: everything since the previous report, the last step, or the epoch so far.

        For held-out samples it covers the last evaluation.
        """
        if report.name == HELD_OUT:
            return [window for window in (self.evaluated(report, state),) if window]
        done = self.until(report.position, state)
        steps, micro_batches = report.position
        last = steps if micro_batches else steps - 1
        epoch = last // self.analysis.epochs.windows * self.analysis.epochs.windows
        begins: list[Position] = [report.previous or (0, 0), (last, 0), (epoch, 0)]
        windows = [tuple(p for p in done if (p.step, p.batch) >= begin) for begin in begins]
        windows.append(tuple(p for p in done if p.step == steps - 1))
        return [window for window in dict.fromkeys(windows) if window]

    def until(self, position: Position, state: LossMode) -> BatchShares:
        """Return all batch shares that were trained on before a position."""
        return tuple(p for p in self.trained(state) if (p.step, p.batch) < position)

    def expected_values(self, report: ReportedValue) -> list[float]:
        """Return the correct values: several, because the trainer chooses the window of a mean."""
        if report.name == TRAINING:
            return [mean(window) for window in self.windows(report, RIGHT[TRAINING])]
        losses = self.each(report.position, RIGHT[HELD_OUT])
        return [] if losses is None else [float(losses.mean())]

    def error(self, report: ReportedValue, value: float) -> float:
        """Return how far a report is from a value, in × noise; infinite for NaN, unless one device overflows too."""
        if not math.isfinite(report.value) and self._overflows(report):
            return 0.0
        error = abs(report.value - value)
        noise = self.noise[report.name].at(report.name, self.unit(value))
        return in_noise(error if math.isfinite(error) else math.inf, noise)

    def _overflows(self, report: ReportedValue) -> bool:
        """Return whether one device's mean is out of range as well, in the cell's precision at the same weights."""
        oracle = self.analysis.cell_oracle
        if report.name == HELD_OUT:
            weights, data, buffers = self.weights(report.position[0]), oracle.held_out, self._buffers(report.position)
            assert weights is not None  # a report after the last step is not judged
            oracle.load(weights)
            return not bool(oracle.evaluation_loss(data, range(len(data)), buffers, training=False).isfinite())
        for step in {share.step for window in self.windows(report, RIGHT[TRAINING]) for share in window}:
            self.analysis.load_step(oracle, self.analysis.steps[step])
            if not bool(_mean(oracle, self._layouts[step]).isfinite()):
                return True
        return False

    @cached_property
    def noise(self) -> dict[str, NoiseScale]:
        """Noise of each mean, by its name: the error of the cell's precision on one device, near each step's weights.

        Under autocast, a sample's loss is rounded in the same way in every order, and sometimes hardly at all. So each
        order has weights of its own, less than a rounding away.
        """
        noise = {name: NoiseScale() for name in RIGHT}  # one of them may overflow in float16, and not the other
        oracle, cell_oracle, rng = self.oracle, self.analysis.cell_oracle, random.Random(self.workload.seed)
        generator = torch.Generator().manual_seed(self.workload.seed)
        held_out = cell_oracle.held_out
        global_steps = [global_step for global_step in self.analysis.steps if self._layouts[global_step.index]]
        everybody = range(len(held_out))
        for global_step in global_steps:
            layout, first = self._layouts[global_step.index], global_step.ranks[0]
            self.analysis.load_step(oracle, global_step)
            self.analysis.load_step(cell_oracle, global_step)
            for _ in range(-(-NOISE_RUNS // len(global_steps))):
                weights = within_a_rounding(first.before, generator, self.analysis.compute_epsilon)
                oracle.load(weights)
                cell_oracle.load(weights)
                order = rng.sample(everybody, len(everybody))
                exact = {
                    TRAINING: _mean(oracle, layout),
                    HELD_OUT: oracle.evaluation_loss(self.held_out, everybody, first.buffers, training=False),
                }
                measured = {
                    TRAINING: _mean(cell_oracle, shuffled(layout, rng)),
                    HELD_OUT: cell_oracle.evaluation_loss(held_out, order, first.buffers, training=False),
                }
                for name, value in exact.items():
                    noise[name].add({name: measured[name]}, {name: value}, {name: self.unit(float(value))})
        return noise

    def unit(self, value: float) -> float:
        """Return the size of one rounding of a value."""
        return rounding_unit([torch.tensor(value, dtype=torch.float64)], max(self.analysis.epsilon, REPORTED_IN))

    @cached_property
    def limit(self) -> float:
        return max(scale.limit for scale in self.noise.values() if scale.runs)


def mean(shares: Sequence[BatchShare]) -> float:
    return total(shares) / sum(len(share.samples) for share in shares)


def total(shares: Sequence[BatchShare]) -> float:
    return sum(share.loss * len(share.samples) for share in shares)


def _mean(oracle: Oracle, layout: Layout) -> torch.Tensor:
    losses = [loss for groups in oracle.losses(layout) for loss in groups]
    counts = [sum(map(len, group)) for groups in layout for group in groups]
    return torch.stack([loss * count for loss, count in zip(losses, counts, strict=True)]).sum() / sum(counts)


def evaluations_due(analysis: TraceAnalysis) -> Iterator[tuple[Position, ...]]:
    """Yield the equivalent positions at which each evaluation is due that the workload asks for."""
    every, epochs = analysis.workload.validate_every, analysis.epochs
    if every is None:
        return
    for epoch in range(epochs.count):
        for batches in range(every, epochs.batches + 1, every):
            positions = epochs.after_batch(epoch, batches)
            if positions[0] <= (analysis.steps_due, 0):
                yield positions


def position_of(analysis: TraceAnalysis, step: int, micro_batches: int, rank: int) -> Position:
    """Return a recorded position, converted to the workload's micro-batches.

    More micro-batches are recorded if each device has its own loss, or if optimizers alternate, each with its own pass.
    """
    if not micro_batches or step >= len(analysis.steps):
        return step, micro_batches
    own = analysis.steps[step].ranks[rank]
    recorded = len(own.micro_batches) * (len(own.turns) if own.alternate else 1)
    return step, -(-micro_batches * len(rank_layout(analysis, step, rank)) // max(recorded, 1))


def rank_layout(analysis: TraceAnalysis, step: int, *ranks: int) -> Layout:
    """Return the layout of a step, also of a skipped one, for all ranks or for ``ranks``, without empty groups."""
    steps = with_unique_draws(analysis.steps[step].ranks)
    spread = analysis.cell.parallelism.devices_per_process(analysis.cell.topology)
    chosen = [steps[rank] for rank in ranks] or steps
    layout = contract_layout(chosen, spread, analysis.workload.accumulate)
    return tuple(tuple(group for group in groups if any(group)) for groups in layout if any(map(any, groups)))
