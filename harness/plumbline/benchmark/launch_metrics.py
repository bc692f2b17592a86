"""The metrics of each launch of a cell, from what its ranks measured: pure arithmetic.

Throughput is samples over time, both summed before they are divided: a mean of rates would give most weight to the
fastest rounds. The time of a round is that of its slowest rank, since a round is over when all ranks have trained it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

import numpy as np

from plumbline.benchmark.pipeline_timeline import bubble
from plumbline.benchmark.sample_work import SampleWork
from plumbline.benchmark.timed_launch import LaunchTimings
from plumbline.evidence.timing import Round

QUANTILES: Final = 41
"""Number of evenly spaced quantiles of single steps, from the minimum to the maximum."""


@dataclass(frozen=True)
class Metric:
    """A metric's unit, and which direction is better, None where neither is."""

    unit: str
    better: Literal["higher", "lower"] | None = None


METRICS: Final[Mapping[str, Metric]] = {
    "throughput": Metric("samples/s", "higher"),
    "throughput_per_gpu": Metric("samples/s", "higher"),
    "tokens_per_gpu": Metric("tokens/s", "higher"),
    "model_flops_per_gpu": Metric("FLOP/s", "higher"),
    "mfu": Metric("share", "higher"),
    "hfu": Metric("share", "higher"),
    "scaling_weak": Metric("ratio", "higher"),
    "scaling_strong": Metric("ratio", "higher"),
    "step_p50": Metric("s", "lower"),
    "step_p95": Metric("s", "lower"),
    "step_first": Metric("s", "lower"),
    "data_wait": Metric("share", "lower"),
    "communication": Metric("share", "lower"),
    "share_compute": Metric("share"),
    "share_exposed_communication": Metric("share", "lower"),
    "share_data": Metric("share", "lower"),
    "share_idle": Metric("share", "lower"),
    "pipeline_bubble": Metric("share", "lower"),
    "rank_skew": Metric("share", "lower"),
    "energy_per_step": Metric("J", "lower"),
    "energy_per_sample": Metric("J", "lower"),
    "overhead": Metric("ratio", "lower"),
    "memory_allocated_peak": Metric("bytes", "lower"),
    "memory_reserved_peak": Metric("bytes", "lower"),
    "allocator_retries": Metric("count", "lower"),
    "out_of_memory": Metric("count", "lower"),
    "memory_private_peak": Metric("bytes", "lower"),
    "tensors_parameters": Metric("bytes"),
    "tensors_gradients": Metric("bytes"),
    "tensors_optimizer": Metric("bytes"),
    "tensors_activations": Metric("bytes"),
}

Key = tuple[str, "int | None"]
"""A metric, and the rank it is about, None if it is about all of them."""

Groups = Sequence[Sequence[int]]
"""Ranks that see the same samples, by their numbers."""


class SamplesError(ValueError):
    """Throughput is undefined: in a round, no samples went through the model, or some more than once."""


@dataclass(frozen=True)
class LaunchSample:
    """One launch of the cell, and that of the hand-written loop whose rounds were paired with its own, if any."""

    timed: LaunchTimings
    yardstick: LaunchTimings | None = None


def samples_of(
    launches: Sequence[LaunchSample],
    devices: int,
    work: SampleWork | None = None,
    replicas: Groups | None = None,
) -> dict[Key, list[float]]:
    """Return the value of each metric in each launch, in order; metrics that a launch lacks are left out.

    ``work`` is what a sample is in tokens and operations; without it nothing is told in these. ``replicas`` are the
    groups of ranks that hold one model together and see the same samples (unless given, each rank alone).
    It raises ``SamplesError`` where throughput is undefined.
    """
    found: dict[Key, list[float]] = {}
    for launch in launches:
        groups = replicas or [[rank.rank] for rank in launch.timed.ranks]
        for key, value in (*_figures(launch, devices, groups), *_work(launch, devices, work, groups)):
            found.setdefault(key, []).append(value)
    return {key: values for key, values in found.items() if len(values) == len(launches)}


def step_quantiles(launches: Sequence[LaunchSample]) -> tuple[float, ...]:
    """Return ``QUANTILES`` evenly spaced quantiles of single steps, in seconds, over all launches."""
    steps = [step for launch in launches for step in _steps(launch.timed)]
    return tuple(map(float, np.quantile(steps, np.linspace(0, 1, QUANTILES))))


def _figures(launch: LaunchSample, devices: int, groups: Groups) -> Iterable[tuple[Key, float]]:
    timed = launch.timed
    seconds = sum(_wall(rounds) for rounds in _rounds(timed))
    throughput = sum(_consumed(rounds, groups) for rounds in _rounds(timed)) / seconds
    steps = sorted(_steps(timed))
    middle = median(steps)
    yield ("throughput", None), throughput
    yield ("throughput_per_gpu", None), throughput / devices
    yield ("step_p50", None), middle
    yield ("step_p95", None), float(np.quantile(steps, 0.95))
    yield ("step_first", None), max(rank.warmup.ended[0] - rank.warmup.begun for rank in timed.ranks)
    yield ("data_wait", None), _data_wait(timed, groups)
    if not isinstance(timed.energy, str):
        yield ("energy_per_step", None), timed.energy / len(steps)
        yield ("energy_per_sample", None), timed.energy / (throughput * seconds)
    if len(timed.ranks) > 1:
        yield ("rank_skew", None), _skew(timed) / middle
        shares = [rank.communication for rank in timed.ranks if rank.communication is not None]
        if len(shares) == len(timed.ranks):
            yield ("communication", None), sum(shares) / len(shares)
    if (waiting := bubble(timed, groups)) is not None:
        yield ("pipeline_bubble", None), waiting
    if launch.yardstick is not None:
        pairs = zip(_rounds(timed), _rounds(launch.yardstick), strict=True)
        yield ("overhead", None), median(_wall(mine) / _wall(by_hand) for mine, by_hand in pairs)
    for rank in timed.ranks:
        for metric, value in {**rank.memory, **(rank.tensors or {})}.items():
            yield (metric, rank.rank), float(value)


def _work(launch: LaunchSample, devices: int, work: SampleWork | None, groups: Groups) -> Iterable[tuple[Key, float]]:
    """Yield what follows from the work of a sample. A utilisation is a part of the peak of all devices together."""
    timed = launch.timed
    shares = [rank.shares for rank in timed.ranks if rank.shares is not None]
    if shares and len(shares) == len(timed.ranks):
        for part in shares[0]:
            yield (f"share_{part}", None), sum(one[part] for one in shares) / len(shares)
    if work is None:
        return
    seconds = sum(_wall(rounds) for rounds in _rounds(timed))
    a_second = sum(_consumed(rounds, groups) for rounds in _rounds(timed)) / seconds / devices
    if work.tokens:
        yield ("tokens_per_gpu", None), a_second * work.tokens
    yield ("model_flops_per_gpu", None), a_second * work.flops
    if not isinstance(work.peak, str):
        yield ("mfu", None), a_second * work.flops / work.peak.flops
        steps = sum(one.steps for one in timed.ranks[0].rounds)
        executed = [rank.flops for rank in timed.ranks if rank.flops is not None]
        if len(executed) == devices:
            yield ("hfu", None), sum(executed) * steps / seconds / devices / work.peak.flops


def _data_wait(timed: LaunchTimings, groups: Groups) -> float:
    """Return the share of the time in which ranks wait for a batch, of a group the rank that waits least.

    The later stages of a pipeline wait for the stages before them, and not for data.
    """
    waits = {
        rank.rank: sum(one.waited for one in rank.rounds) / sum(one.seconds for one in rank.rounds)
        for rank in timed.ranks
        if any(one.forwards for one in rank.rounds)
    }
    least = [min((waits[rank] for rank in group if rank in waits), default=0.0) for group in groups]
    return sum(least) / len(least)


def _rounds(timed: LaunchTimings) -> Iterable[tuple[Round, ...]]:
    return zip(*(rank.rounds for rank in timed.ranks), strict=True)


def _wall(rounds: Sequence[Round]) -> float:
    return max(one.seconds for one in rounds)


def _consumed(rounds: Sequence[Round], groups: Groups) -> int:
    """Return how many samples all ranks together consumed in a round: those of a group as one of its ranks saw them.

    Of a pipeline some stages may never call the job's model.
    """
    samples = [sample for group in groups for sample in max((rounds[rank].samples for rank in group), key=len)]
    if not samples:
        raise SamplesError("no samples passed through job.model() in a round: train the model that it returns")
    if len(set(samples)) < len(samples):
        raise SamplesError(
            f"{len(samples)} samples passed through the model in a round, but only {len(set(samples))} of them are "
            "distinct: check that each rank trains on its own shard"
        )
    return len(samples)


def _steps(timed: LaunchTimings) -> list[float]:
    """Return the seconds of each step, from when the last rank had finished the step before."""
    steps: list[float] = []
    for rounds in _rounds(timed):
        ends = [max(moment) for moment in zip(*(one.ended for one in rounds), strict=True)]
        begun = min(one.begun for one in rounds)
        steps += [now - before for before, now in zip([begun, *ends], ends, strict=False)]
    return steps


def _skew(timed: LaunchTimings) -> float:
    """Return the median over steps of the time between the first and the last rank's end, in seconds."""
    ends = [moment for rounds in _rounds(timed) for moment in zip(*(one.ended for one in rounds), strict=True)]
    skew: float = median(max(moment) - min(moment) for moment in ends)
    return skew
