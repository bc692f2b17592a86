"""What went through the model since the last step: forwards, the losses that closed them, and which of them trained."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from plumbline.evidence.trace import MicroBatch, Tensors


@dataclass
class Forward:
    """One forward of one device with gradients enabled: its sample ids, the model's mode, and what its layers drew."""

    device: int
    ids: tuple[int, ...]
    training: bool
    differentiated: bool = False
    drawn: Tensors = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether it is a part of training; in evaluation mode only if a backward went through it.

        A trainer that forgets ``no_grad`` where it evaluates wastes memory, and that is all.
        """
        return self.training or self.differentiated


class Passes:
    """The passes since the last step. A loss of the job's closes one; without it each forward is one."""

    def __init__(self) -> None:
        self._closed: list[tuple[list[Forward], tuple[int, ...] | None]] = []
        self._open: list[Forward] = []

    def __len__(self) -> int:
        """How many micro-batches there are so far."""
        closed = sum(not forwards or any(forward.trains for forward in forwards) for forwards, _ in self._closed)
        return closed + sum(forward.trains for forward in self._open)

    def add(self, forward: Forward) -> None:
        """Take up a forward, before it is computed."""
        self._open.append(forward)

    def last_on(self, device: int) -> Forward | None:
        """Return the last forward of a device: replicas on CUDA run in threads."""
        return next((forward for forward in reversed(self._open) if forward.device == device), None)

    def redraw(self, device: int, name: str, drawn: Tensor) -> None:
        """Take up what a layer drew when a backward computed its forward once more, if it is not what it drew then."""
        forwards = [forward for closed, _ in self._closed for forward in closed] + self._open
        alike = [f for f in forwards if f.device == device and name in f.drawn and f.drawn[name].shape == drawn.shape]
        if alike and not any(torch.equal(forward.drawn[name], drawn) for forward in alike):
            alike[-1].drawn[f"{name} again"] = drawn

    def close(self, loss: tuple[int, ...] | None) -> None:
        """End a pass, with the sample ids that its loss was given."""
        # Replicas on CUDA run in threads, in any order: the contract's order is that of the devices.
        self._closed.append((sorted(self._open, key=lambda forward: forward.device), loss))
        self._open = []

    def settle(self) -> tuple[list[MicroBatch], list[tuple[int, Forward]]]:
        """Begin anew; return the micro-batches, and each forward that only evaluated, after so many of them."""
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
