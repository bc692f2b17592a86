"""What kind of training was recorded: ranks, steps, optimizers, precision, wrapper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from plumbline.check.evidence.training import RecordedRank, RecordedTraining


@dataclass(frozen=True)
class Description:
    """A training in figures and names. What no process noted is left out.

    ``steps`` counts those of the optimizer that has most of them, on the rank that has most; ``passes`` are the
    smallest and the largest number of backward passes of a step. ``optimizers`` are classes, one for each optimizer of
    a rank; ``precision`` are dtypes of parameters and autocast; ``wrappers`` are the classes around the model.
    ``steps_at`` is the file and the line of the script in which the first step was taken, None where a library took it.
    """

    ranks: int
    steps: int
    passes: tuple[int, int]
    optimizers: tuple[str, ...]
    precision: tuple[str, ...]
    wrappers: tuple[str, ...]
    steps_at: tuple[str, int] | None = None


def describe(training: RecordedTraining) -> Description:
    passes = [len(step.passes) for rank in training.ranks for step in rank.steps]
    return Description(
        training.world_size,
        max((most_steps(rank) for rank in training.ranks), default=0),
        (min(passes, default=0), max(passes, default=0)),
        tuple(_optimizers(training.ranks[0])),
        tuple(dict.fromkeys(_precision(training))),
        tuple(dict.fromkeys(_wrappers(training))),
        next(_lines(training), None),
    )


def most_steps(rank: RecordedRank) -> int:
    """Return how many steps the optimizer took that took most."""
    return max(Counter(step.optimizer for step in rank.steps).values(), default=0)


def _optimizers(rank: RecordedRank) -> Iterator[str]:
    for number in sorted({step.optimizer for step in rank.steps}):
        noted = (step.facts.get("update", {}).get("class") for step in rank.steps if step.optimizer == number)
        yield next(filter(None, noted), "an optimizer")


def _precision(training: RecordedTraining) -> Iterator[str]:
    steps = [step for rank in training.ranks for step in rank.steps]
    yield from (parameter.dtype for step in steps for parameter in step.parameters)
    for step in steps:
        for name in step.facts.get("precision", {}).get("autocast", ()):
            if not name.endswith(" off"):
                yield f"autocast {name}"
        if any(one.scale != 1 for one in step.passes):
            yield "loss scale"


def _wrappers(training: RecordedTraining) -> Iterator[str]:
    for rank in training.ranks:
        for module in (rank.facts.get("parallelism") or {}).get("modules", ()):
            if module.get("wrapper"):
                yield "DistributedDataParallel"
            if module.get("sharded_as_data"):
                yield "sharded"


def _lines(training: RecordedTraining) -> Iterator[tuple[str, int]]:
    for rank in training.ranks:
        noted = rank.facts.get("script") or {}
        if "line" in noted:
            yield noted["file"], noted["line"]
