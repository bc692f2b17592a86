"""Pairs a resumed training with an uninterrupted one, and compares the state of the optimizer where it resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plumbline.check.evidence.training import Facts, RecordedStep, RecordedTraining
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.judge.findings import failed_with_hint
from plumbline.report.text import listed

STATE = "resumable-state"


@dataclass(frozen=True)
class Resumption:
    """Two trainings: ``whole`` was not interrupted, ``resumed`` was resumed after ``interrupted`` steps.

    ``begins``: for each optimizer, the step of the whole training at which the resumed one continues.
    """

    whole: RecordedTraining
    resumed: RecordedTraining
    interrupted: int
    begins: Mapping[int, int]

    @property
    def begin(self) -> int:
        """The step at which the first optimizer continues."""
        return self.begins[min(self.begins)]

    @property
    def same_ranks(self) -> bool:
        return self.whole.world_size == self.resumed.world_size

    def pairs(self) -> Iterator[tuple[int, int, RecordedStep, RecordedStep]]:
        """Yield each resumed step: its number, its rank, the matching step of the whole training, and the step itself.

        On a different number of ranks, each rank is compared with rank 0 of the whole training.
        """
        others = {one.rank: _by_number(one.steps) for one in self.whole.ranks}
        for rank in self.resumed.ranks:
            expected = others.get(rank.rank if self.same_ranks else 0, {})
            for step in rank.steps:
                other = expected.get((step.optimizer, self.begins[step.optimizer] + step.number))
                if other is not None:
                    yield step.number, rank.rank, other, step


def step_at(pair: Resumption, rank: int, number: int, optimizer: int) -> RecordedStep | None:
    found = pair.whole.ranks[rank if pair.same_ranks else 0].steps
    return next((one for one in found if one.number == number and one.optimizer == optimizer), None)


def same_weights(one: RecordedStep, other: RecordedStep, *, with_shards: bool) -> bool:
    mine, theirs = weights_of(one, with_shards=with_shards), weights_of(other, with_shards=with_shards)
    shared = [name for name in mine if name in theirs and mine[name][0] is not None]
    return bool(shared) and all(mine[name][0] == theirs[name][0] for name in shared)


Name = tuple[str, tuple[int, ...]]
"""A parameter's name and shape."""


def weights_of(step: RecordedStep, *, with_shards: bool) -> dict[Name, tuple[str | None, list[float] | None]]:
    named = zip(step.parameters, step.facts[STATE]["weights"], strict=False)
    return {(p.name, p.shape): (digest, made) for p, (digest, made, shard) in named if with_shards or not shard}


def states_of(step: RecordedStep, *, with_shards: bool) -> dict[Name, Facts]:
    known = weights_of(step, with_shards=with_shards)
    named = zip(step.parameters, step.facts[STATE]["state"], strict=False)
    return {(p.name, p.shape): state for p, state in named if (p.name, p.shape) in known}


def _by_number(steps: Sequence[RecordedStep]) -> dict[tuple[int, int], RecordedStep]:
    return {(step.optimizer, step.number): step for step in steps}


CHECK = "resumption"


def judge_resumed_state(pair: Resumption) -> Finding | None:
    """Return what is wrong with the optimizer state at the start of the resumed training; None if nothing is."""
    if not pair.same_ranks:
        return _state_on_other_ranks(pair)
    for place, rank, expected, step in pair.pairs():
        if place:
            continue
        mine, theirs = (states_of(one, with_shards=True) for one in (step, expected))
        shared = [name for name in mine if name in theirs]
        missing = [name for name in shared if theirs[name] and not mine[name]]
        other = [(name, _differing(mine[name], theirs[name])) for name in shared if name not in missing]
        where = {"step": pair.begin, "rank": rank, "family": "checkpoint"}
        if missing and len(missing) == len([name for name in shared if theirs[name]]):
            return failed_with_hint(
                CHECK, "the optimizer's state is not restored: it is empty after the restart",
                "save optimizer.state_dict(), and load it after the model has its parameters",
                cause="optimizer-state-dropped", **where,
            )  # fmt: skip
        if missing:
            return failed_with_hint(
                CHECK, f"the optimizer's state is not restored for {len(missing)} of {len(shared)} parameters",
                "save the whole state: with sharded optimizers, gather it from all ranks first",
                cause="optimizer-state-in-part", parameter=missing[0][0], **where,
            )  # fmt: skip
        if (altered := _altered(other, where)) is not None:
            return altered
    return None


def _state_on_other_ranks(pair: Resumption) -> Finding | None:
    mine, theirs = _of_both(pair)
    where = {"step": pair.begin, "family": "checkpoint"}
    shared = [name for name in theirs if theirs[name] and name in mine]
    missing = [name for name in shared if not mine[name]]
    if missing:
        return failed_with_hint(
            CHECK, f"the optimizer's state is not restored for {len(missing)} of {len(shared)} parameters: no rank "
            "has it",
            "save the whole state: with sharded optimizers, gather it from all ranks first",
            cause="optimizer-state-dropped" if len(missing) == len(shared) else "optimizer-state-in-part",
            parameter=missing[0][0], **where,
        )  # fmt: skip
    pairs = ((name, _of_one_value(mine[name]), _of_one_value(theirs[name])) for name in shared)
    other = [(name, sorted(key for key in own if own[key] != saved.get(key, own[key]))) for name, own, saved in pairs]
    return _altered(other, where)


def _of_both(pair: Resumption) -> tuple[dict[Name, dict[str, set[Any]]], dict[Name, dict[str, set[Any]]]]:
    return _known_states(pair.resumed, dict.fromkeys(pair.begins, 0)), _known_states(pair.whole, pair.begins)


def _known_states(training: RecordedTraining, begins: Mapping[int, int]) -> dict[Name, dict[str, set[Any]]]:
    """Return the values of the state of each whole parameter, on all ranks that have any, before a step."""
    found: dict[Name, dict[str, set[Any]]] = {}
    for step in training.steps:
        if step.number == begins.get(step.optimizer):
            for name, state in states_of(step, with_shards=False).items():
                own = found.setdefault(name, {})
                for key, value in state.items():
                    own.setdefault(key, set()).add(value)
    return found


def _of_one_value(state: Mapping[str, set[Any]]) -> dict[str, Any]:
    """Return the values on which all ranks agree. Each rank may hold a slice of a state."""
    return {key: next(iter(values)) for key, values in state.items() if len(values) == 1}


def shares_states(pair: Resumption) -> bool:
    """Return whether states could be compared on a different number of ranks, or the optimizers have none."""
    known = _of_both(pair)
    mine, theirs = ({name: _of_one_value(state) for name, state in one.items()} for one in known)
    has_any = any(states for one in known for states in one.values())
    return not has_any or any(name in mine and mine[name].keys() & theirs[name].keys() for name in theirs)


def _altered(other: Sequence[tuple[Name, list[str]]], where: Mapping[str, Any]) -> Finding | None:
    other = [(name, keys) for name, keys in other if keys]
    if not other:
        return None
    (name, _), keys = other[0]
    return failed_with_hint(
        CHECK, f"the restored optimizer state differs for {counted(len(other), 'parameter')}: {listed(keys)} of {name}",
        "check that the state is saved after the step, in its own dtype, and loaded for the same parameters",
        cause="optimizer-state-altered", parameter=name, **where,
    )  # fmt: skip


def _differing(mine: Facts, theirs: Facts) -> list[str]:
    return sorted(name for name, value in theirs.items() if mine.get(name) != value)
