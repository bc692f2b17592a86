"""Measures the seconds (with device events or a clock) and bytes of blocks and stages, and checks memory limits."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.devices.calls import counts_peak, has_events, mark, max_memory_allocated, reset_peak_memory, synchronize
from plumbline.trainer.balanced.blocks import held_tensors
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.nested import tensors_in
from plumbline.trainer.optimizers import parameters_of


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations allocate within the context, until they are freed.

    It does not count earlier storages, temporary memory within an operation, or tensors on the meta device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            self._note(tensor, new=False)
        outputs = func(*args, **(kwargs or {}))
        for tensor in tensors_in(outputs):
            self._note(tensor, new=True)
        self.peak = max(self.peak, self.now)
        return outputs

    def _note(self, tensor: Tensor, *, new: bool) -> None:
        if tensor.is_sparse:
            return  # its indices and values are noted when they are created
        storage = tensor.untyped_storage()
        size = storage.nbytes() if new and storage.device.type != "meta" else 0
        known = self._seen.get(storage._cdata)
        if known is not None and known() is not None:
            return
        self._seen[storage._cdata] = weakref.ref(storage)
        if size:
            self.now += size
            weakref.finalize(storage, self._freed, size).atexit = False

    def _freed(self, size: int) -> None:
        self.now -= size


@dataclass
class StageMemory:
    """Measures a stage's peak memory and checks that it is at most ``allowed`` bytes (None: no limit).

    It measures batches up to the first that starts with optimizer state, so later batches are not slowed down. On
    devices, the allocator counts. On the CPU, the peak includes the storages of parameters, buffers, gradients and
    optimizer state, and a batch's allocations, but neither the batch itself nor temporary memory of an optimizer step.
    Weights of ``module`` on other stages are empty.
    """

    name: str
    module: nn.Module
    optimizers: Sequence[Optimizer]
    device: torch.device
    allowed: int | None
    peak: int = 0
    measuring: bool = True
    _stepped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if counts_peak(self.device):
            reset_peak_memory(self.device)  # because planning has measured all blocks on this device
        for number, optimizer in enumerate(self.optimizers):
            self._note_first_step(number, optimizer)

    @contextmanager
    def measure(self) -> Iterator[None]:
        self.measuring = len(self._stepped) < len(self.optimizers)
        if counts_peak(self.device):
            yield
            self._note(max_memory_allocated(self.device))
        else:
            before = self._held_bytes()
            with LiveBytes() as live:
                yield
            self._note(before + live.peak)

    def peak_bytes(self) -> int:
        if counts_peak(self.device):
            self.peak = max(self.peak, max_memory_allocated(self.device))
        return self.peak

    def _note_first_step(self, number: int, optimizer: Optimizer) -> None:
        def note(*_: Any) -> None:
            handle.remove()
            self._stepped.add(number)
            if not counts_peak(self.device):  # otherwise, the next batch's peak includes it
                self._note(self._held_bytes())

        handle = optimizer.register_step_post_hook(note)

    def _note(self, held: int) -> None:
        self.peak = max(self.peak, held)
        if self.allowed is not None and self.peak > self.allowed:
            raise MisconfigurationError(
                f"{self.name} needs {self.peak:,} bytes, as measured, and its device may hold {self.allowed:,}: allow "
                "more device_memory, or use more gpus, a smaller batch_size or more micro_batches."
            )

    def _held_bytes(self) -> int:
        weights: list[Any] = list(held_tensors(self.module).values())
        for optimizer in self.optimizers:
            weights += parameters_of(optimizer)
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        held = [*weights, *(weight.grad for weight in weights if weight.grad is not None), *tensors_in(states)]
        parts = [part for one in held for part in ((one._indices(), one._values()) if one.is_sparse else (one,))]
        storages = [part.untyped_storage() for part in parts]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


Clock = Callable[[], Any]
"""A function that returns a point in time, for ``median_seconds``."""


def computing_clock(device: torch.device) -> Clock:
    """Return a clock for this thread's computation on a device.

    On a CPU with one thread, it is the thread's CPU time, because simulated devices can share cores with other
    processes.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return thread_time
    return wall_clock(device)


def wall_clock(device: torch.device) -> Clock:
    if device.type == "cpu":
        return perf_counter
    return partial(mark, device) if has_events(device) else partial(_when_idle, device)


def median_seconds(spans: Iterable[tuple[Any, Any]]) -> float:
    """Return the median seconds between pairs of points in time, 0 if there are none."""
    spans = list(spans)
    if not spans:
        return 0.0
    if isinstance(spans[0][0], float):
        return float(median(end - start for start, end in spans))
    spans[-1][1].synchronize()
    return float(median(start.elapsed_time(end) / 1000 for start, end in spans))


def _when_idle(device: torch.device) -> float:
    synchronize(device)
    return perf_counter()


KEPT = 256
"""Number of latest times that are kept of each kind, such as of forwards."""


class StageClock:
    """Measures this stage's computation without waiting, and whole batches including waiting."""

    def __init__(self, device: torch.device) -> None:
        self.computing, self.wall = computing_clock(device), wall_clock(device)
        self.spans: dict[str, deque[tuple[Any, Any]]] = defaultdict(lambda: deque(maxlen=KEPT))
        self.disturbed = False
        """Whether the times so far are too long. They are then discarded at the next measurement, if there is one."""

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Measure the computation in this context, unless it raises. For kind ``"batch"``, include waiting."""
        if self.disturbed:
            self.disturbed = False
            self.spans.clear()
        clock = self.wall if kind == "batch" else self.computing
        start = clock()
        yield
        self.spans[kind].append((start, clock()))

    def report(self) -> tuple[float, float]:
        """Return the median seconds of a micro-batch (forward + backward) and of a batch."""
        forward, backward, batch = (median_seconds(self.spans[kind]) for kind in ("forward", "backward", "batch"))
        return forward + backward, batch
