"""Differences between correct trainers, which ``@subject(...)`` declares and the judge relies on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

CHOICES = {
    "data": ("epochs", "iterations"),
    "shuffle": ("job", "always", "never"),
    "buffers": ("shared", "per-rank"),
    "loss": ("job", "labels"),
    "model": ("job", "adapters"),
    "gradients": ("weights", "float32"),
    "devices": ("shared", "own"),
    "batches": ("any", "equal"),
}
"""The values of each declaration. The first is the default."""


DIVISIBLE = ("heads", "features", "experts")
"""Counts that the number of ranks may have to divide."""


@dataclass(frozen=True)
class TrainingBehavior:
    """How a subject trains. :func:`~plumbline.subjects.declare.subject` describes the values.

    Raises:
        ValueError: a value is unknown, or two values contradict each other.
    """

    data: str = "epochs"
    shuffle: str = "job"
    buffers: str = "shared"
    loss: str = "job"
    model: str = "job"
    gradients: str = "weights"
    max_nodes: int | None = None
    stages_per_rank: int = 1
    max_stages: int | None = None
    divides: tuple[str, ...] = ()
    devices: str = "shared"
    batches: str = "any"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown {name}={getattr(self, name)!r}; choose from {', '.join(choices)}")
        for name in ("max_nodes", "stages_per_rank", "max_stages"):
            given, what = getattr(self, name), "nodes" if name == "max_nodes" else "stages"
            left_out = given is None and name.startswith("max_")
            if not left_out and (type(given) is not int or given < 1):
                raise ValueError(f"{name}={given!r} is not a number of {what}: give 1 or more, or omit it")
        for name in self.divides:
            if name not in DIVISIBLE:
                raise ValueError(f"unknown divides={name!r}; choose from {', '.join(DIVISIBLE)}")
        if self.by_iterations and self.shuffle != "job":
            raise ValueError(f"data='iterations' has no epochs to shuffle: omit shuffle={self.shuffle!r}")

    @classmethod
    def of(cls, declared: Mapping[str, Any]) -> TrainingBehavior:
        """Undo :attr:`declared`."""
        unknown = declared.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown declaration {min(unknown)!r}")
        return cls(**{**declared, "divides": tuple(declared.get("divides", "").split())})

    @property
    def declared(self) -> dict[str, str | int]:
        """The values that differ from the defaults, by name; several are joined by spaces."""
        own = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        return {name: " ".join(value) if isinstance(value, tuple) else value for name, value in own.items()}

    @property
    def by_iterations(self) -> bool:
        return self.data == "iterations"

    @property
    def own_buffers(self) -> bool:
        return self.buffers == "per-rank"

    @property
    def own_loss(self) -> bool:
        return self.loss == "labels"

    @property
    def adapters_only(self) -> bool:
        return self.model == "adapters"

    @property
    def needs_own_devices(self) -> bool:
        return self.devices == "own"

    @property
    def needs_equal_batches(self) -> bool:
        return self.batches == "equal"

    def shuffles(self, asked: bool) -> bool:
        """Return whether the order of samples changes each epoch; ``asked`` is ``job.shuffle``."""
        return asked if self.shuffle == "job" else self.shuffle == "always"


ORDINARY = TrainingBehavior()
"""The behavior of a subject that declares nothing."""


EVERY_OTHER = "*"
"""The key for every accelerator that is not a key itself."""


def of_accelerator(declared: Mapping[str, Sequence[str]], accelerator: str) -> Sequence[str]:
    """Return the declaration for ``accelerator``; empty if there is none."""
    return declared.get(accelerator, declared.get(EVERY_OTHER, ()))
