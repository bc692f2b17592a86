"""Exchanges activations and gradients between neighboring stages, and finds the stage that makes no progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

GRACE = 30.0
"""Seconds in which a rank must report that it waits too. A smaller limit replaces this."""

LOST = 2.0
"""Seconds after a lost connection in which another rank can report that it has waited too long."""

EVERYBODY = "everybody"
"""The target that a rank reports when it waits in an operation of all ranks."""


class StageTimeoutError(RuntimeError):
    """Another rank has not sent or received anything for too long."""


class StageTimeout:
    """Waits at most ``limit`` seconds for other stages of the pipeline, or for all ranks.

    This rank has stage ``stage`` of ``stages``. Stage 0 is on rank ``first``, and the others on the following ranks.
    Ranks that have waited too long report in ``store`` which rank they wait for, so that the error can name the stage
    at fault.
    """

    def __init__(self, limit: float, stage: int, first: int, store: Any, stages: int) -> None:
        self.limit, self.stage, self.first, self.store, self.stages = limit, stage, first, store, stages

    @contextmanager
    def waiting(self, awaited: int | str) -> Iterator[None]:
        """Wait in this context for a stage of this pipeline, given by number, or for an operation of all ranks."""
        start, rank = monotonic(), self.first + self.stage
        target = EVERYBODY if isinstance(awaited, str) else str(self.first + awaited)
        try:
            yield
        except StageTimeoutError:
            raise
        except RuntimeError as error:
            if monotonic() - start < self.limit and not self._has_said("somebody", LOST):
                raise  # the connection is lost, because the other rank has ended and reports why
            self.store.set(_key("somebody"), target)
            self.store.set(_key(rank), target)
            last = self._last(rank, target)
            name = awaited if isinstance(awaited, str) else f"stage {awaited}"
            waited = f"Stage {self.stage} has waited {self.limit:g} s for {name}"
            if last is None:
                raise StageTimeoutError(
                    f"{waited}, and all ranks are waiting: they run different steps. Check that training_step, "
                    "validation_step and the data loaders do the same on all ranks, or give a longer stage_timeout."
                ) from error
            fault = f"stage {last % self.stages}"
            between = "" if target in (EVERYBODY, str(last)) else f" (which waits, directly or indirectly, for {fault})"
            raise StageTimeoutError(
                f"{waited}{between}: {fault}, on rank {last}, makes no progress. Check what that process does, or give "
                "a longer stage_timeout."
            ) from error

    def _last(self, rank: int, target: str) -> int | None:
        """Follow the chain of waiting ranks to a rank that does not wait. Return it, or None if all wait."""
        seen, end = {rank}, monotonic() + min(self.limit, GRACE)
        while target != EVERYBODY and int(target) not in seen:
            rank = int(target)
            seen.add(rank)
            if not self._has_said(rank, end - monotonic()):
                return rank
            target = self.store.get(_key(rank)).decode()
        others = (rank for rank in range(dist.get_world_size()) if rank not in seen)
        return next((rank for rank in others if not self._has_said(rank, end - monotonic())), None)

    def _has_said(self, who: int | str, seconds: float) -> bool:
        try:
            self.store.wait([_key(who)], timedelta(seconds=max(seconds, 0.01)))
        except RuntimeError:  # not reported, or the store is gone
            return False
        return True


def _key(who: int | str) -> str:
    return f"stage waits/{who}"


def group_with_timeout(limit: float) -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))


def limit_default_group(limit: float) -> None:
    _set_pg_timeout(timedelta(seconds=limit), dist.group.WORLD)


Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Sent:
    """Tensors that are being sent to a stage, kept until they have been sent."""

    stage: int
    works: list[Any]
    tensors: list[Tensor]


class Exchange:
    """Sends tensors to and receives tensors from neighboring stages, in order. Sending does not block.

    Activations and gradients have separate process groups with NCCL, because the two directions between a pair of ranks
    would otherwise wait for each other. Shapes use the gloo group ``control``. Stages are given by number: stage 0 is
    on rank ``timeout.first``, the others on the following ranks.
    """

    def __init__(self, device: torch.device, timeout: StageTimeout) -> None:
        self.device = device
        self.first = timeout.first
        self.timeout = timeout
        self.control = control = group_with_timeout(timeout.limit)
        nccl = dist.get_backend() == "nccl"
        self.wire = device if nccl else torch.device("cpu")
        self.groups = {True: dist.new_group() if nccl else control, False: dist.new_group() if nccl else control}
        self.pending: dict[bool, deque[Sent]] = {True: deque(), False: deque()}

    def send(self, tensors: Sequence[Tensor], stage: int, *, forward: bool) -> None:
        """Send tensors to a stage, and keep them until ``wait_until_sent`` or ``finish``."""
        sent = [tensor.detach().to(self.wire).contiguous() for tensor in tensors]
        rank, group = self.first + stage, self.groups[forward]
        works = [dist.isend(tensor, rank, group) for tensor in sent]
        self.pending[forward].append(Sent(stage, works, sent))

    def send_gradients(self, gradients: Sequence[Tensor | None], shapes: Sequence[Shape], stage: int) -> None:
        """Send which gradients exist, then these gradients. If there is only one and it is missing, send zeros."""
        if len(gradients) == 1:
            (shape, dtype), gradient = shapes[0], gradients[0]
            one = torch.zeros(shape, dtype=dtype, device=self.device) if gradient is None else gradient
            self.send([one], stage, forward=False)
            return
        present = torch.tensor([gradient is not None for gradient in gradients])
        known: Any = dist.isend(present, self.first + stage, self.control) if gradients else None
        self.send([gradient for gradient in gradients if gradient is not None], stage, forward=False)
        if known is not None:
            self.pending[False][-1].works.append(known)
            self.pending[False][-1].tensors.append(present)

    def receive_gradients(self, shapes: Sequence[Shape], stage: int) -> list[Tensor | None]:
        """Receive gradients of these shapes, None where the stage has no gradient."""
        present = torch.ones(len(shapes), dtype=torch.bool)
        if len(shapes) > 1:
            work: Any = dist.irecv(present, self.first + stage, self.control)
            with self.timeout.waiting(stage):
                work.wait()
        there = present.tolist()
        received = iter(self.receive([s for s, one in zip(shapes, there, strict=True) if one], stage, forward=False))
        return [next(received) if one else None for one in there]

    def receive(self, shapes: Sequence[Shape], stage: int, *, forward: bool) -> list[Tensor]:
        received = []
        for shape, dtype in shapes:
            tensor = torch.empty(shape, dtype=dtype, device=self.wire)
            work: Any = dist.irecv(tensor, self.first + stage, self.groups[forward])
            with self.timeout.waiting(stage):
                work.wait()
            received.append(tensor.to(self.device))
        return received

    def send_shapes(self, tensors: Sequence[Tensor], stage: int) -> None:
        with self.timeout.waiting(stage):
            dist.send_object_list([shapes_of(tensors)], self.first + stage, self.control)

    def receive_shapes(self, stage: int) -> list[Shape]:
        box: list[Any] = [None]
        with self.timeout.waiting(stage):
            dist.recv_object_list(box, self.first + stage, self.control)
        return list(box[0])

    def wait_until_sent(self, *, forward: bool, but: int = 0) -> None:
        """Wait until all messages in a direction, except the last ``but``, have been sent, and free their tensors."""
        pending = self.pending[forward]
        while len(pending) > but:
            sent = pending.popleft()
            with self.timeout.waiting(sent.stage):
                for work in sent.works:
                    work.wait()

    def finish(self) -> None:
        self.wait_until_sent(forward=True)
        self.wait_until_sent(forward=False)


def shapes_of(tensors: Sequence[Tensor]) -> list[Shape]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
