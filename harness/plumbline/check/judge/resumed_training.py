"""Pairs a resumed training with an uninterrupted one: the same steps, weights and optimizer states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plumbline.check.evidence.training import Facts, RecordedStep, RecordedTraining

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
