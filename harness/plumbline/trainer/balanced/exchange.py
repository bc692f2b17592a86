"""Exchanges activations and gradients between neighboring stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plumbline.trainer.balanced.stage_timeout import StageTimeout, group_with_timeout

Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Sent:
    """Tensors on the way to a stage, kept until they have been sent."""

    stage: int
    works: list[Any]
    tensors: list[Tensor]


class Exchange:
    """Sends to and receives from neighboring stages, in order; sending does not wait.

    Activations and gradients have separate process groups: under NCCL the two directions between a pair of ranks would
    otherwise wait for one another. Shapes have a group too. Stages are given by number; stage 0 is on rank
    ``timeout.first``, the others on the following ranks.
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
        """Send which gradients exist, and those; a single missing gradient is sent as zeros."""
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
        """Return gradients of these shapes, None where a stage has none."""
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
        """Wait until everything in a direction has been sent, except the last ``but`` messages, and free it."""
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
