"""Chooses the plan with the shortest simulated step from profiles with different numbers of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from plumbline.trainer.balanced.partition import DoesNotFitError, StageCosts, partition
from plumbline.trainer.balanced.stage_plan import StagePlan
from plumbline.trainer.balanced.stages import Prediction, Profile, Stage
from plumbline.trainer.errors import MisconfigurationError


def best_plan(
    profiles: dict[int, Profile],
    devices: int,
    memory: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
) -> StagePlan:
    """Return the plan with the shortest simulated step, that of the optimizers included.

    Args:
        profiles: By number of micro-batches.
        devices: The number of devices.
        memory: Bytes that each device may hold; device ``d`` has stage ``d`` modulo the number of stages.
        stages: The numbers of stages to choose from, divisors of ``devices``. Replicas of the stages are on the other
            devices, and share the micro-batches. None: as many stages as devices.

    Raises:
        MisconfigurationError: No plan fits; the message is that of the plan with the most stages and micro-batches.
    """
    found: list[tuple[StagePlan, Profile]] = []
    refusals: dict[tuple[bool, int, int], MisconfigurationError] = {}
    for number in stages or [devices]:
        replicas = devices // number
        limits = None if memory is None else [min(memory[stage::number]) for stage in range(number)]
        for count, measured in profiles.items():
            try:
                if count % replicas:
                    raise MisconfigurationError(
                        f"{count} micro-batches cannot be shared by {replicas} replicas of {number} stages: use a "
                        "multiple, other batches, or another number of stages."
                    )
                chosen = partition(measured, number, count // replicas, limits)
                found.append((plan_stages(measured, chosen, count, limits, replicas), measured))
            except MisconfigurationError as refusal:
                refusals[isinstance(refusal, DoesNotFitError), number, count] = refusal
    if not found:
        raise refusals[max(refusals)]
    most = WORTH_IMPROVING * min(planned.predicted.period_seconds for planned, _ in found)
    return min((improved(*one) for one in found if one[0].predicted.period_seconds <= most), key=cost)


LEAST_GAIN = 1e-9
"""The least relative gain that is worth another plan; less is rounding."""

WORTH_IMPROVING = 2.0
"""Plans that take at most this many times the best plan's step are improved block by block."""


def cost(planned: StagePlan) -> tuple[float, int]:
    """Return the cost by which plans are compared: the seconds from step to step, then the largest peak memory."""
    return planned.predicted.period_seconds, max(planned.predicted.stage_peak_bytes)


def improved(best: StagePlan, measured: Profile) -> StagePlan:
    """Return the plan that results from moving single blocks between stages as long as that makes it faster.

    A partition minimises the slowest stage, which is what counts with many micro-batches. With few of them the start
    and the end of a step count as well, and so do the optimizers' steps there.
    """
    while True:
        others = (
            plan_stages(measured, moved, best.micro_batches, best.memory, best.replicas)
            for moved in moved_by_one(best.stages)
        )
        better = min(filter(_fits, others), key=cost, default=best)
        if better.predicted.period_seconds >= best.predicted.period_seconds * (1 - LEAST_GAIN):
            return best
        best = better


def moved_by_one(stages: Sequence[Stage]) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages with one boundary moved by one block; each stage keeps a block."""
    bounds = [0, *(stage.last for stage in stages)]
    for place in range(1, len(stages)):
        for bound in (bounds[place] - 1, bounds[place] + 1):
            if bounds[place - 1] < bound < bounds[place + 1]:
                moved = [*bounds[:place], bound, *bounds[place + 1 :]]
                yield tuple(Stage(first, last) for first, last in pairwise(moved))


def _fits(planned: StagePlan) -> bool:
    limits = planned.memory
    return limits is None or all(
        peak <= limit for peak, limit in zip(planned.predicted.stage_peak_bytes, limits, strict=True)
    )


def plan_stages(
    measured: Profile,
    stages: Sequence[Stage],
    micro_batches: int,
    memory: Sequence[int] | None = None,
    replicas: int = 1,
) -> StagePlan:
    costs = StageCosts(measured, len(stages), micro_batches // replicas)
    unknown = Prediction(
        step_seconds=0.0,
        optimizer_seconds=tuple(costs.optimizer_seconds(stage.first, stage.last) for stage in stages),
        stage_seconds=tuple(costs.seconds(stage.first, stage.last) for stage in stages),
        stage_peak_bytes=tuple(costs.peak_bytes(one.first, one.last, number) for number, one in enumerate(stages)),
        bubble_share=0.0,
    )
    planned = StagePlan(
        measured.blocks,
        tuple(stages),
        micro_batches,
        unknown,
        None if memory is None else tuple(memory),
        measured.ties,
        replicas,
    )
    schedule = planned.schedule()
    predicted = replace(
        unknown,
        step_seconds=schedule.makespan,
        bubble_share=schedule.bubble_share,
        period_seconds=schedule.period(unknown.optimizer_seconds),
    )
    return replace(planned, predicted=predicted)
