"""Assembles a step from the forwards since the last one, the losses that ended them, and the optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from plumbline.evidence.trace import MicroBatch, Step, Tensors


@dataclass
class Forward:
    """One forward on one device with gradients enabled: its sample ids, the model's mode, and its layers' draws."""

    device: int
    ids: tuple[int, ...]
    training: bool
    differentiated: bool = False
    drawn: Tensors = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether this forward is part of the training; in evaluation mode only if a backward pass went through it.

        An evaluation without ``no_grad`` only wastes memory.
        """
        return self.training or self.differentiated


class Passes:
    """The passes since the last step. A call of the job's loss ends a pass; without one, each forward is a pass."""

    def __init__(self) -> None:
        self._closed: list[tuple[list[Forward], tuple[int, ...] | None]] = []
        self._open: list[Forward] = []

    def __len__(self) -> int:
        closed = sum(not forwards or any(forward.trains for forward in forwards) for forwards, _ in self._closed)
        return closed + sum(forward.trains for forward in self._open)

    def add(self, forward: Forward) -> None:
        self._open.append(forward)

    def last_on(self, device: int) -> Forward | None:
        """Return the last forward on a device: replicas on several devices run in threads."""
        return next((forward for forward in reversed(self._open) if forward.device == device), None)

    def redraw(self, device: int, name: str, drawn: Tensor) -> None:
        """Record what a layer drew in a recomputation by a backward pass, if it differs from the forward's draw."""
        forwards = [forward for closed, _ in self._closed for forward in closed] + self._open
        alike = [f for f in forwards if f.device == device and name in f.drawn and f.drawn[name].shape == drawn.shape]
        if alike and not any(torch.equal(forward.drawn[name], drawn) for forward in alike):
            alike[-1].drawn[f"{name} again"] = drawn

    def close(self, loss: tuple[int, ...] | None) -> None:
        """End a pass. ``loss`` has the sample ids that the loss was computed for."""
        # Replicas on devices run in threads, in any order. The contract orders them by device.
        self._closed.append((sorted(self._open, key=lambda forward: forward.device), loss))
        self._open = []

    def settle(self) -> tuple[list[MicroBatch], list[tuple[int, Forward]]]:
        """Return the micro-batches, and the forwards that only evaluated, each with its place among these; reset."""
        micro_batches: list[MicroBatch] = []
        idle: list[tuple[int, Forward]] = []
        for forwards, loss in [*self._closed, *(([forward], None) for forward in self._open)]:
            trained = [forward for forward in forwards if forward.trains]
            idle += [(len(micro_batches), forward) for forward in forwards if not forward.trains]
            if trained or not forwards:
                micro_batches.append(_micro_batch(trained, loss))
        self._closed, self._open = [], []
        return micro_batches, idle


def _micro_batch(forwards: list[Forward], loss: tuple[int, ...] | None) -> MicroBatch:
    names = {name for forward in forwards for name in forward.drawn}
    drawn = {name: torch.cat([f.drawn[name] for f in forwards if name in f.drawn]) for name in sorted(names)}
    return MicroBatch(tuple(forward.ids for forward in forwards), loss, drawn)


@dataclass(frozen=True)
class OptimizerPart:
    """One optimizer's part of a step: ``names`` are its parameters; ``step`` is the step as if it were alone.

    ``step`` has micro-batches if there was a pass since the previous optimizer stepped.
    """

    optimizer: int
    names: tuple[str, ...]
    step: Step


def belongs(part: OptimizerPart, to: Sequence[OptimizerPart]) -> bool:
    """Return whether a part belongs to the same step as ``to``: it has other parameters, and no other samples.

    An optimizer that steps its parameter groups one after another also makes one step.
    """
    if not to or any(set(part.names) & set(other.names) for other in to):
        return False
    if any(part.optimizer == other.optimizer for other in to) and not part.names:
        return False
    own, first = part.step.micro_batches, to[0].step.micro_batches
    return not own or _samples(own) == _samples(first) or bool(_alternating(first, own))


def joined(parts: Sequence[OptimizerPart]) -> Step:
    """Join all parts into one step. Parameter groups are in the model's order, whichever optimizer stepped first.

    Samples count once, even if there was a pass for each part before any optimizer stepped.
    """
    first, last = parts[0].step, parts[-1].step
    place = {name: number for number, name in enumerate(first.before)}
    in_order = sorted(parts, key=lambda part: min((place[name] for name in part.names), default=len(place)))
    turns: list[tuple[str, ...]] = []
    for part in parts:
        if turns and not part.step.micro_batches:
            turns[-1] += part.names
        else:
            turns.append(part.names)
    alternating = _alternating(first.micro_batches, last.micro_batches)
    skipped = all(part.step.skipped for part in parts)
    return replace(
        first,
        micro_batches=alternating or _once(first.micro_batches, len(parts)),
        alternate=bool(alternating),
        gradients=_gradients(part for part in in_order if part.step.skipped == skipped),
        after=last.after,
        learning_rates=tuple(rate for part in in_order for rate in part.step.learning_rates),
        skipped=skipped,
        turns=tuple(turns) if len(turns) > 1 else (),
        held_back=_gradients(part for part in in_order if part.step.skipped != skipped),
    )


def _gradients(parts: Iterable[OptimizerPart]) -> Tensors:
    return {name: value for part in parts for name, value in part.step.gradients.items()}


def _alternating(first: tuple[MicroBatch, ...], later: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of a window in which each has one pass for every optimizer; else an empty tuple.

    ``first`` has the passes before the first optimizer step: all except the other optimizers' passes over the last
    micro-batch.
    """
    size = len(later)
    if not size or len(first) <= size or len(first) % size:
        return ()
    runs = [first[start : start + size] for start in range(0, len(first), size)]
    *earlier, last = map(_samples, runs)
    times = next((index for index, run in enumerate(earlier) if run != earlier[0]), len(earlier))
    complete = len(earlier) % times == 0 and all(
        run == earlier[index - index % times] for index, run in enumerate(earlier)
    )
    if times < 2 or not complete or last != _samples(later):
        return ()
    return tuple(micro for run in (*runs[:-1:times], runs[-1]) for micro in run)


def _once(micro_batches: tuple[MicroBatch, ...], times: int) -> tuple[MicroBatch, ...]:
    size, rest = divmod(len(micro_batches), times)
    runs = [micro_batches[start : start + size] for start in range(0, size * times, max(size, 1))]
    repeated = runs and not rest and all(_samples(run) == _samples(runs[0]) for run in runs)
    return runs[0] if repeated else micro_batches


def _samples(micro_batches: Sequence[MicroBatch]) -> list[tuple[object, ...]]:
    return [(micro.forwards, micro.loss) for micro in micro_batches]
