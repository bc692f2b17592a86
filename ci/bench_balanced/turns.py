"""Trainings that take turns: each waits between optimizer steps until it may take some more."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch

from plumbline.devices.freed_memory import keep_freed_memory

WARM_UP = 4
"""Steps before the first turn: the first ones measure memory, and create optimizer state."""

CORES = sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Turn:
    """The wall time of some steps, and the seconds that each rank computed."""

    seconds: float
    busy: tuple[float, ...]


class Pace:
    """Lets a rank take ``steps`` optimizer steps at a time, on a given core."""

    def __init__(self, wire: Any, rank: int, steps: int) -> None:
        self.wire, self.rank, self.steps, self.left = wire, rank, steps, WARM_UP
        self.news: Callable[[], Any] = lambda: None

    def follow(self, optimizer: torch.optim.Optimizer, news: Callable[[], Any] = lambda: None) -> None:
        """Pin the rank to a core, and wait after optimizer steps; call ``news()`` each time."""
        run_on(CORES[self.rank % len(CORES)])
        self.news = news
        optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            self.wire.send((perf_counter(), process_time(), self.news()))
            run_on(self.wire.recv())
            self.left = self.steps


def run_on(core: int) -> None:
    """Move all threads of this process to a core."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended, or this is not allowed
            os.sched_setaffinity(int(thread), {core})


class Training:
    """A training with ``ranks`` processes forked from this one; ``train(paces)`` takes all its steps."""

    def __init__(self, train: Callable[[list[Pace]], Any], ranks: int, steps: int) -> None:
        context = multiprocessing.get_context("fork")
        pairs = [context.Pipe() for _ in range(ranks)]
        self.wires = [ours for ours, _ in pairs]
        self.answer, answer = context.Pipe(duplex=False)
        paces = [Pace(theirs, rank, steps) for rank, (_, theirs) in enumerate(pairs)]
        self.process = context.Process(target=partial(_train, train, paces, answer))
        self.process.start()
        for wire in (answer, *(theirs for _, theirs in pairs)):
            wire.close()
        messages = [wire.recv() for wire in self.wires]
        self.computed = [computed for _, computed, _ in messages]
        self.news = messages[0][2]  # from rank 0, after the warm-up

    def go(self, cores: Sequence[int]) -> None:
        """Let all ranks take their steps, each on its core."""
        self.begun = perf_counter()
        for wire, core in zip(self.wires, cores, strict=True):
            wire.send(core)

    def wait(self) -> Turn:
        """Wait for all ranks."""
        messages = [wire.recv() for wire in self.wires]
        before, self.computed = self.computed, [computed for _, computed, _ in messages]
        busy = tuple(after - earlier for earlier, after in zip(before, self.computed, strict=True))
        return Turn(max(end for end, _, _ in messages) - self.begun, busy)

    def end(self) -> Any:
        """Let the training end; return what ``train`` returned."""
        for wire in self.wires:
            wire.send(CORES[0])
        answer = self.answer.recv()
        self.process.join()
        return answer

    def close(self) -> None:
        """Stop the training at once."""
        if self.process.is_alive():
            self.process.terminate()
        self.process.join()


def _train(train: Callable[[list[Pace]], Any], paces: list[Pace], answer: Any) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    answer.send(train(paces))
