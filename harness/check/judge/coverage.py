"""Which share of a training's trainable parameters was judged, and why the rest was not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.check.evidence.training import RecordedStep, RecordedTraining

NO_REPLAY = "its backward passes were not computed again"
NO_STEP = "its optimizer took none of the recorded steps; record more of them"
NO_GRADIENT = "no gradient arrived at it in the recorded steps"

NOT_SAMPLED = "it is not in the part of the parameters that --sample-parameters asks for"


@dataclass(frozen=True)
class Uncovered:
    """Parameters that were not computed again in float64, for one reason; ``entries`` counts their elements."""

    why: str
    names: tuple[str, ...]
    entries: int


@dataclass(frozen=True)
class Coverage:
    """Elements of the trainable parameters, of one rank's where all ranks hold the same.

    Of ``entries``, a gradient arrived at ``compared``; those of ``replayed`` were also computed again in float64.
    """

    entries: int
    compared: int
    replayed: int
    uncovered: tuple[Uncovered, ...]

    @property
    def share(self) -> float:
        """The share that was replayed, from 0 to 1."""
        return self.replayed / self.entries if self.entries else 0.0

    @property
    def compared_share(self) -> float:
        """The share at which gradients arrived, from 0 to 1."""
        return self.compared / self.entries if self.entries else 0.0


def coverage_of(training: RecordedTraining) -> Coverage:
    """Return what was judged of a training: a parameter counts where it was on every rank, in every step."""
    why: dict[tuple[int, str], str] = {}
    entries: dict[tuple[int, str], int] = {}
    arrived: set[tuple[int, str]] = set()
    for rank in training.ranks:
        for step in rank.steps:
            for name, size, reason, reached in _parameters(step, rank.facts.get("uncovered") or {}):
                key = (step.optimizer, name)
                entries[key] = max(size, entries.get(key, 0))
                if reached:
                    arrived.add(key)
                if reason:
                    why.setdefault(key, reason)
    for key in entries:
        if key not in arrived and why.get(key) != NOT_SAMPLED:
            why[key] = NO_GRADIENT
    for key, size in _unstepped(training):
        if key not in entries:
            entries[key], why[key] = size, NO_STEP
    return Coverage(
        sum(entries.values()),
        sum(entries[key] for key in arrived),
        sum(size for key, size in entries.items() if key not in why),
        tuple(sorted(_by_reason(why, entries), key=lambda one: -one.entries)),
    )


def _unstepped(training: RecordedTraining) -> Iterator[tuple[tuple[int, str], int]]:
    """Yield each parameter of optimizers that have no recorded step, and its size."""
    for rank in training.ranks:
        for optimizer, parameters in (rank.facts.get("unstepped") or {}).items():
            for name, size in parameters.items():
                yield (int(optimizer), name), size


def _by_reason(why: Mapping[tuple[int, str], str], entries: Mapping[tuple[int, str], int]) -> Iterator[Uncovered]:
    for reason in dict.fromkeys(why.values()):
        keys = [key for key, value in why.items() if value == reason]
        yield Uncovered(reason, tuple(name for _, name in keys), sum(entries[key] for key in keys))


def _parameters(step: RecordedStep, reasons: Mapping[str, str]) -> Iterator[tuple[str, int, str, bool]]:
    """Yield each parameter's name and size, why it was not replayed ("" if it was), and whether a gradient arrived."""
    reached = [_holds_any(one.local != 0, step) for one in step.passes]
    unknown = [
        there if one.exact is None else there & _holds_any(one.exact.isnan(), step)
        for there, one in zip(reached, step.passes, strict=True)
    ]
    for place, parameter in enumerate(step.parameters):
        why = reasons.get(parameter.name, NO_REPLAY) if any(bool(one[place]) for one in unknown) else ""
        why = why if parameter.sampled else NOT_SAMPLED
        yield parameter.name, parameter.entries, why, any(bool(one[place]) for one in reached)


def _holds_any(marked: Tensor, step: RecordedStep) -> Tensor:
    """Return for each parameter whether any entry of its segment is marked."""
    lengths = torch.tensor([one.length for one in step.parameters])
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
    return torch.zeros(len(lengths), dtype=torch.long).index_add_(0, numbers, marked.long()) > 0
