"""Whether all ranks begin with the same weights, where gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.noted import failed_observers, information
from plumbline.check.judge.rank_layout import rank_layout
from plumbline.check.judge.ranks_agree import must_agree
from plumbline.check.judge.recorded_weights import (
    RankWeights,
    common_steps,
    of_all,
    reduced_parameters,
    weights_at,
)
from plumbline.core.finding import Finding
from plumbline.judge.causes.weights import UnequalStartCase, differing_parameters
from plumbline.judge.findings import failed, failed_with_hint, passed
from plumbline.judge.hypothesis import explain

CHECK = "initial-weights"


def judge_initial_weights(training: RecordedTraining) -> Iterator[Finding]:
    """Yield one finding about the weights before each optimizer's first recorded step, and about frozen ones."""
    yield from failed_observers(training, "weights", CHECK)
    layout = rank_layout(training)
    if training.world_size == 1:
        return
    reduced = reduced_parameters(training)
    compared, every, seen = 0, 0, set()
    for place, steps in common_steps(training):
        step = steps[training.ranks[0].rank]
        if step.optimizer in seen:
            continue
        seen.add(step.optimizer)
        weights = list(weights_at(place, steps))
        compared += len(weights)
        every += len(step.parameters)
        differing = [one for one in weights if one.differ("before")]
        accused = [one for one in differing if must_agree(one, step.optimizer, layout, reduced) and not one.is_rounding]
        if accused:
            yield _failure(accused, len(weights), place, step.number)
            return
        if differing:
            what = differing_parameters([one.parameter.name for one in differing], len(weights))
            yield information(CHECK, f"{what} between ranks at the first recorded step; {layout.reason}")
            return
    frozen = _frozen(training) if layout.is_data_parallel else None
    if frozen is not None:
        yield frozen
    elif compared:
        yield passed(CHECK, f"all ranks begin with the same {of_all(compared, every)}")


def _failure(accused: list[RankWeights], of: int, place: int, number: int) -> Finding:
    worst = max(accused, key=lambda one: one.distance)
    size = f"by up to {worst.distance:.2g} of the norm" if worst.distance < float("inf") else "by an unknown distance"
    message = f"weights differ between ranks before the first recorded step, {size}"
    if number:  # they may have been equal once
        return replace(
            failed_with_hint(CHECK, message, f"check what changes weights before step {number}", family="sync"),
            step=place,
        )
    start = UnequalScriptStart([one.parameter.name for one in accused], of)
    return replace(explain(failed(CHECK, message, parameter=worst.parameter.name), start), step=place)


@dataclass(frozen=True, eq=False)
class UnequalScriptStart(UnequalStartCase):
    """A script whose ranks begin with different weights."""

    names: Sequence[str]
    of: int

    @property
    def differing(self) -> tuple[Sequence[str], int]:
        return self.names, self.of


def _frozen(training: RecordedTraining) -> Finding | None:
    for modules in zip(*(rank.facts.get("weights", {}).get("modules", ()) for rank in training.ranks), strict=False):
        tables = [{(p["name"], tuple(p["shape"])): p for p in module["parameters"]} for module in modules]
        if not all(module["wrapped"] for module in modules) or any(
            table.keys() != tables[0].keys() for table in tables
        ):
            continue
        frozen = [key for key, p in tables[0].items() if not p["trained"] and not p["ignored"] and p["digest"]]
        differing = [key[0] for key in frozen if len({table[key]["digest"] for table in tables}) > 1]
        if differing:
            return failed_with_hint(
                CHECK,
                f"{len(differing)} of {len(frozen)} frozen parameters differ between ranks at the first recorded "
                "forward, although DistributedDataParallel broadcast them when it was created",
                "load and initialise weights before creating DistributedDataParallel",
                cause="not-broadcast",
                family="sync",
                parameter=differing[0],
            )
    return None
