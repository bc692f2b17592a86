"""How a subject trains, where correct trainers differ: ``@subject(...)`` declares it, and the judge relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

CHOICES = {
    "data": ("epochs", "iterations"),
    "shuffle": ("job", "always", "never"),
    "buffers": ("shared", "per-rank"),
    "loss": ("job", "labels"),
}
"""The values of each declaration; the first is the default."""


@dataclass(frozen=True)
class TrainingBehavior:
    """What a subject declares about its way of training. The defaults apply to a subject that declares nothing.

    Args:
        data: ``epochs``: each sample is used once an epoch, on one rank. ``iterations``: each rank draws samples as it
            likes, with or without replacement, for ``job.steps`` optimizer steps; there are no epochs.
        shuffle: ``job``: as ``job.shuffle`` says. ``always`` and ``never``: whatever ``job.shuffle`` says.
        buffers: ``shared``: all ranks begin each step's forward with the first rank's buffers. ``per-rank``: each rank
            keeps the buffers that its own samples made, and nothing is broadcast.
        loss: ``job``: the loss is the job's. ``labels``: the trainer computes it by itself, as the mean cross entropy
            of the tokens in the column ``labels``, and so it trains no other workloads.
        max_nodes: it does not train on more nodes than this; None: on any number.
        stages_per_rank: how many stages each rank of a pipeline has.
        max_stages: its pipelines have no more stages than this; None: any number.

    Raises:
        ValueError: a value is not one of these, or two of them contradict each other.
    """

    data: str = "epochs"
    shuffle: str = "job"
    buffers: str = "shared"
    loss: str = "job"
    max_nodes: int | None = None
    stages_per_rank: int = 1
    max_stages: int | None = None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"there is no {name}={getattr(self, name)!r}; there are {', '.join(choices)}")
        for name in ("max_nodes", "stages_per_rank", "max_stages"):
            given, what = getattr(self, name), "nodes" if name == "max_nodes" else "stages"
            left_out = given is None and name.startswith("max_")
            if not left_out and (type(given) is not int or given < 1):
                raise ValueError(f"{name}={given!r} is not a number of {what}: give 1 or more, or leave it out")
        if self.by_iterations and self.shuffle != "job":
            raise ValueError(
                f"data='iterations' has no epochs that could be in order or not: leave shuffle={self.shuffle!r} out"
            )

    @classmethod
    def of(cls, declared: Mapping[str, Any]) -> TrainingBehavior:
        """Undo :attr:`declared`.

        Raises:
            ValueError: a name or a value is not known to this version.
        """
        unknown = declared.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"there is no declaration {min(unknown)!r}")
        return cls(**declared)

    @property
    def declared(self) -> dict[str, str | int]:
        """What differs from the default, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @property
    def by_iterations(self) -> bool:
        return self.data == "iterations"

    @property
    def own_buffers(self) -> bool:
        return self.buffers == "per-rank"

    @property
    def own_loss(self) -> bool:
        return self.loss == "labels"

    def shuffles(self, asked: bool) -> bool:
        """Return whether samples are in another order in each epoch, where the job says ``asked``."""
        return asked if self.shuffle == "job" else self.shuffle == "always"


ORDINARY = TrainingBehavior()
"""The behavior of a subject that declares nothing."""
