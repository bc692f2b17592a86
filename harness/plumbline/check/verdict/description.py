"""What kind of training was recorded: ranks, steps, optimizers, precision, wrapper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from plumbline.check.evidence.training import RecordedRank, RecordedTraining


@dataclass(frozen=True)
class Description:
    """Figures and names that describe a training. What no process recorded is left out.

    ``steps`` is the number of steps of the optimizer that took the most, on the rank that took the fewest. ``passes``
    is the smallest and the largest number of backward passes in a step. ``optimizers`` has the class of each optimizer
    of the first rank. ``precision`` has dtypes of parameters and autocast, and whether the loss was scaled.
    ``wrappers`` says how the model is wrapped. ``steps_at`` is the file and line of the script that took the first
    step, None if a library took it.
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
        min((most_steps(rank) for rank in training.ranks if rank.steps), default=0),
        (min(passes, default=0), max(passes, default=0)),
        tuple(_optimizers(training.ranks[0])),
        tuple(dict.fromkeys(_precision(training))),
        tuple(dict.fromkeys(_wrappers(training))),
        next(_lines(training), None),
    )


def most_steps(rank: RecordedRank) -> int:
    """Return the largest number of steps that one optimizer took."""
    return max(Counter(step.optimizer for step in rank.steps).values(), default=0)


def _optimizers(rank: RecordedRank) -> Iterator[str]:
    for number in sorted({step.optimizer for step in rank.steps}):
        noted = (step.noted("update").get("class") for step in rank.steps if step.optimizer == number)
        yield next(filter(None, noted), "an optimizer")


def _precision(training: RecordedTraining) -> Iterator[str]:
    steps = [step for rank in training.ranks for step in rank.steps]
    yield from (parameter.dtype for step in steps for parameter in step.parameters)
    for step in steps:
        for name in step.noted("precision").get("autocast", ()):
            if not name.endswith(" off"):
                yield f"autocast {name}"
        if any(one.scale != 1 for one in step.passes):
            yield "loss scale"


def _wrappers(training: RecordedTraining) -> Iterator[str]:
    for rank in training.ranks:
        for module in rank.noted("parallelism").get("modules", ()):
            if module.get("wrapper"):
                yield "DistributedDataParallel"
            if module.get("sharded_as_data"):
                yield "sharded"


def _lines(training: RecordedTraining) -> Iterator[tuple[str, int]]:
    for rank in training.ranks:
        noted = rank.noted("script")
        if "line" in noted:
            yield noted["file"], noted["line"]
