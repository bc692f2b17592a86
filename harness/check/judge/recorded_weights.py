"""Compares the weights of the ranks, by their digests, and by how far they are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.check.evidence.training import Parameter, RecordedStep, RecordedTraining

OBSERVER = "weights"

ULPS = 8
"""Units of the last place by which weights differ that were rounded otherwise, and not more; the distance of the
projections is known to a factor of two."""


@dataclass(frozen=True)
class RankWeights:
    """One parameter at one step on all ranks: what the ranks noted of it, in their order."""

    parameter: Parameter
    noted: tuple[Mapping[str, Any], ...]
    received: tuple[torch.Tensor, ...]

    @property
    def is_wrapped(self) -> bool:
        """Whether a DistributedDataParallel keeps it the same on every rank."""
        return all(one["wrapped"] for one in self.noted)

    def differ(self, when: str) -> bool:
        """Say whether ranks differ in the values they ``began`` with, had ``before`` or ``after``, or ``gradients``."""
        return len({one[when] for one in self.noted}) > 1

    @property
    def share_gradient(self) -> bool:
        """Whether all ranks step with the same gradient, bit for bit, that is not zero."""
        known = self.noted[0]["gradients"] is not None
        return known and not self.differ("gradients") and all(bool(one.nan_to_num().any()) for one in self.received)

    @property
    def distance(self) -> float:
        """The largest distance from the first rank's weights after the step, relative to their norm."""
        first, *others = [one["projections"] for one in self.noted]
        if first is None or any(other is None for other in others):
            return float("inf")
        reference = torch.tensor(first, dtype=torch.float64)
        most = max(float((torch.tensor(other, dtype=torch.float64) - reference).norm()) for other in others)
        norm = float(reference.norm())
        return most / norm if norm else (float("inf") if most else 0.0)

    @property
    def is_rounding(self) -> bool:
        """Whether the ranks' weights are no farther apart than rounding otherwise explains."""
        dtype = getattr(torch, self.parameter.dtype)
        return dtype.is_floating_point and self.distance <= ULPS * torch.finfo(dtype).eps


def weights_at(place: int, steps: Mapping[int, RecordedStep]) -> Iterator[RankWeights]:
    """Yield each parameter of a step that is whole on every rank; none where the ranks stepped differently."""
    noted = [step.facts.get(OBSERVER) for step in steps.values()]
    alike = {(step.optimizer, step.number, step.parameters) for step in steps.values()}
    if len(alike) > 1 or any(one is None for one in noted):
        return
    parameters = next(iter(steps.values())).parameters
    received = [step.parts(step.received) for step in steps.values()]
    for index, parameter in enumerate(parameters):
        here = tuple({name: values[index] for name, values in one.items()} for one in noted if one is not None)
        if all(one["before"] is not None and one["after"] is not None for one in here):
            yield RankWeights(parameter, here, tuple(one[index] for one in received))


def common_steps(training: RecordedTraining) -> Iterator[tuple[int, Mapping[int, RecordedStep]]]:
    """Yield the places of the steps that every rank of the world recorded, and the steps by rank."""
    if len(training.ranks) == training.world_size:
        for place in range(min((len(rank.steps) for rank in training.ranks), default=0)):
            yield place, training.at(place)


def weights_are_made_equal(training: RecordedTraining) -> bool:
    """Say whether ranks that hold different weights after a step hold the same ones before a later one of them."""
    apart: set[tuple[int, str]] = set()
    for place, steps in common_steps(training):
        optimizer = next(iter(steps.values())).optimizer
        weights = {(optimizer, one.parameter.name): one for one in weights_at(place, steps)}
        if apart & weights.keys() and not any(one.differ("before") for one in weights.values()):
            return True
        apart |= {name for name, one in weights.items() if one.differ("after")}
    return False


def ranks_begin_apart(training: RecordedTraining) -> bool:
    """Say whether ranks begin to train with weights of their own, and nothing keeps them the same."""
    first = next(common_steps(training), None)
    return first is not None and any(one.differ("began") and not one.is_wrapped for one in weights_at(*first))


def kinds(names: list[str], of: int) -> str:
    """Return how many parameters these are, and of which kind: ``3 of 12 parameters (all of them biases)``."""
    if len(names) == of:
        return f"all {of} parameters"
    biases = all(name.endswith("bias") for name in names)
    which = "" if not biases else " (a bias)" if len(names) == 1 else " (all of them biases)"
    return f"{len(names)} of {of} parameters{which}"
