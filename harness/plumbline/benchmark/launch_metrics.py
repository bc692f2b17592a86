"""The metrics of each launch of a cell, from what its ranks measured: pure arithmetic.

Throughput is samples over time, both summed before they are divided: a mean of rates would give most weight to the
fastest rounds. The time of a round is that of its slowest rank, since a round is over when all ranks have trained it.

The bubble of a pipeline is the part of all stages' time in which they wait: 1 - busy / (ranks × span), from the step's
first chunk to the end of its last one. Other work (the optimizer, sums of tied weights) is outside of that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median
from typing import Final, Literal

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from plumbline.benchmark.timed_launch import LaunchSample, LaunchTimings
from plumbline.core.cell import Cell
from plumbline.evidence.timing import FORWARD, Chunk, Round
from plumbline.machine.peak_flops import OF_A_CPU, Peak, peak_of
from plumbline.results.records import TimelineChunk
from plumbline.worker.timing.profiler import union
from plumbline.workloads import PERFORMANCE


@dataclass(frozen=True)
class SampleWork:
    """A sample's ``tokens`` (or 0) and ``flops``, forward and backward; a device's ``peak``, or why it is unknown."""

    tokens: int
    flops: float
    peak: Peak | str


def work_of(cell: Cell, device: str | None) -> SampleWork:
    tokens, flops = _work_of_workload(cell.workload, cell.accelerator)
    return SampleWork(tokens, flops, OF_A_CPU if cell.accelerator == "cpu" else peak_of(device, cell.precision))


@cache
def _work_of_workload(name: str, accelerator: str) -> tuple[int, float]:
    """Return a sample's tokens, and its operations in a forward and a backward pass, counted without computing them.

    Matrix products, convolutions and attention count, a multiplication with its addition as two. Causal attention
    counts like full attention. What a trainer recomputes to save memory (activation checkpoints) is not counted again.
    """
    workload = PERFORMANCE[name].on(accelerator)
    batch = {key: column.to("meta") for key, column in workload.columns(2, torch.Generator()).items()}
    with torch.device("meta"):
        model = workload.build()
        with FlopCounterMode(display=False) as counter:
            torch.autograd.backward(workload.loss(model(batch), batch))
    return workload.size.model.get("length", 0), counter.get_total_flops() / 2


Step = Mapping[int, Sequence[Chunk]]  # the chunks of one step by rank, in the order in which they ran
MOST_CHUNKS: Final = 1000  # a timeline of more chunks would be unreadable: it is neither kept nor drawn
_NS = 1e9


def bubble(timed: LaunchTimings, groups: Sequence[Sequence[int]]) -> float | None:
    """Return the median over steps of the mean bubble of a launch's pipelines; None if chunks are missing."""
    steps = _followed_steps(timed)
    if not steps:
        return None

    def of(step: Step, ranks: Sequence[int]) -> float:
        spans = {rank: sorted((round(one.begun * _NS), round(one.ended * _NS)) for one in step[rank]) for rank in ranks}
        begun = min(begin for own in spans.values() for begin, _ in own)
        ended = max(end for own in spans.values() for _, end in own)
        return 1 - sum(map(union, spans.values())) / (len(ranks) * (ended - begun))

    return median(fmean(of(step, group) for group in groups) for step in steps)


def timeline(timed: LaunchTimings, groups: Sequence[Sequence[int]]) -> tuple[TimelineChunk, ...]:
    """Return the chunks of the last recorded step, from its beginning, with stages numbered in the model's order."""
    steps = _followed_steps(timed)
    if not steps or sum(map(len, steps[-1].values())) > MOST_CHUNKS:
        return ()
    step = steps[-1]
    begun = min(chunk.begun for chunks in step.values() for chunk in chunks)
    firsts = {
        (rank, chunk.stage): chunk.begun
        for rank, chunks in step.items()
        for chunk in chunks
        if chunk.kind == FORWARD and chunk.micro_batch == 0
    }
    numbers: dict[tuple[int, int], int] = {}
    for group in groups:
        own = (key for key in firsts if key[0] in group)
        numbers |= {key: number for number, key in enumerate(sorted(own, key=firsts.__getitem__))}
    return tuple(
        TimelineChunk(
            rank=rank,
            stage=numbers[rank, chunk.stage],
            micro_batch=chunk.micro_batch,
            kind=chunk.kind,
            begin=round(chunk.begun - begun, 7),
            end=round(chunk.ended - begun, 7),
        )
        for rank, chunks in step.items()
        for chunk in chunks
        if (rank, chunk.stage) in numbers
    )


def _followed_steps(timed: LaunchTimings) -> list[Step]:
    steps = zip(*(rank.pipeline for rank in timed.ranks), strict=True)
    return [{rank.rank: own for rank, own in zip(timed.ranks, step, strict=True)} for step in steps if all(step)]


QUANTILES: Final = 41  # number of evenly spaced quantiles of single steps, from the minimum to the maximum


@dataclass(frozen=True)
class Metric:
    """A metric's unit, and which direction is better, None if neither is."""

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

Key = tuple[str, "int | None"]  # a metric, and the rank it is about, None if it is about all of them
Groups = Sequence[Sequence[int]]  # groups of ranks that see the same samples


class SamplesError(ValueError):
    """Throughput is undefined: in a round, no samples went through the model, or some more than once."""


def samples_of(
    launches: Sequence[LaunchSample],
    devices: int,
    work: SampleWork | None = None,
    replicas: Groups | None = None,
) -> dict[Key, list[float]]:
    """Return the value of each metric in each launch, in order; metrics that a launch lacks are left out.

    ``work`` has the tokens and operations of a sample; without it, metrics of these are left out. ``replicas`` are the
    groups of ranks that together hold one model and see the same samples (default: each rank alone).
    Raise ``SamplesError`` if throughput is undefined.
    """
    found: dict[Key, list[float]] = {}
    for launch in launches:
        groups = replicas or [[rank.rank] for rank in launch.timed.ranks]
        for key, value in _figures(launch, devices, work, groups):
            found.setdefault(key if isinstance(key, tuple) else (key, None), []).append(value)
    return {key: values for key, values in found.items() if len(values) == len(launches)}


def step_quantiles(launches: Sequence[LaunchSample]) -> tuple[float, ...]:
    """Return ``QUANTILES`` evenly spaced quantiles of single steps, in seconds, over all launches."""
    steps = [step for launch in launches for step in _steps(launch.timed)]
    return tuple(map(float, np.quantile(steps, np.linspace(0, 1, QUANTILES))))


def _figures(
    launch: LaunchSample, devices: int, work: SampleWork | None, groups: Groups
) -> Iterable[tuple[str | Key, float]]:
    timed = launch.timed
    seconds = sum(_wall(rounds) for rounds in _rounds(timed))
    throughput = sum(_consumed(rounds, groups) for rounds in _rounds(timed)) / seconds
    steps = sorted(_steps(timed))
    middle = median(steps)
    yield "throughput", throughput
    yield "throughput_per_gpu", throughput / devices
    yield "step_p50", middle
    yield "step_p95", float(np.quantile(steps, 0.95))
    yield "step_first", max(rank.warmup.ended[0] - rank.warmup.begun for rank in timed.ranks)
    yield "data_wait", _data_wait(timed, groups)
    if not isinstance(timed.energy, str):
        yield "energy_per_step", timed.energy / len(steps)
        yield "energy_per_sample", timed.energy / (throughput * seconds)
    if len(timed.ranks) > 1:
        ends = [moment for rounds in _rounds(timed) for moment in zip(*(one.ended for one in rounds), strict=True)]
        yield "rank_skew", median(max(moment) - min(moment) for moment in ends) / middle
        communication = [rank.communication for rank in timed.ranks if rank.communication is not None]
        if len(communication) == len(timed.ranks):
            yield "communication", sum(communication) / len(communication)
    if (waiting := bubble(timed, groups)) is not None:
        yield "pipeline_bubble", waiting
    if launch.yardstick is not None:
        pairs = zip(_rounds(timed), _rounds(launch.yardstick), strict=True)
        yield "overhead", median(_wall(mine) / _wall(by_hand) for mine, by_hand in pairs)
    for rank in timed.ranks:
        for metric, value in {**rank.memory, **(rank.tensors or {})}.items():
            yield (metric, rank.rank), float(value)
    shares = [rank.shares for rank in timed.ranks if rank.shares is not None]
    if shares and len(shares) == len(timed.ranks):
        for part in shares[0]:
            yield f"share_{part}", sum(one[part] for one in shares) / len(shares)
    if work is not None:
        yield from _work(timed, throughput / devices, seconds, devices, work)


def _work(
    timed: LaunchTimings, rate: float, seconds: float, devices: int, work: SampleWork
) -> Iterable[tuple[str, float]]:
    if work.tokens:
        yield "tokens_per_gpu", rate * work.tokens
    yield "model_flops_per_gpu", rate * work.flops
    if isinstance(work.peak, str):
        return
    yield "mfu", rate * work.flops / work.peak.flops
    steps = sum(one.steps for one in timed.ranks[0].rounds)
    executed = [rank.flops for rank in timed.ranks if rank.flops is not None]
    if len(executed) == devices:
        yield "hfu", sum(executed) * steps / seconds / devices / work.peak.flops


def _data_wait(timed: LaunchTimings, groups: Groups) -> float:
    # Later stages of a pipeline wait for earlier ones, not for data, so the shortest wait of a group counts.
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
    # Some stages of a pipeline may never call the job's model, so the rank with most samples counts.
    samples = [sample for group in groups for sample in max((rounds[rank].samples for rank in group), key=len)]
    if not samples:
        raise SamplesError("no samples passed through job.model() in a round: train the model that job.model() returns")
    if len(set(samples)) < len(samples):
        raise SamplesError(
            f"{len(samples)} samples passed through the model in a round, but only {len(set(samples))} of them are "
            "distinct: check that each rank trains on its own shard"
        )
    return len(samples)


def _steps(timed: LaunchTimings) -> list[float]:
    steps: list[float] = []
    for rounds in _rounds(timed):
        ends = [max(moment) for moment in zip(*(one.ended for one in rounds), strict=True)]
        begun = min(one.begun for one in rounds)
        steps += [now - before for before, now in zip([begun, *ends], ends, strict=False)]
    return steps
