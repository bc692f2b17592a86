"""What travels between neighboring stages: activations forward, their gradients backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Shape = tuple[tuple[int, ...], torch.dtype]


class Exchange:
    """Sends to and receives from neighboring stages, in order; sending does not wait.

    Activations and gradients have a process group each: under NCCL the two directions between a pair of ranks would
    otherwise wait for one another. ``control`` is a gloo group for shapes. Stages are given by number; that of number 0
    is on rank ``first``, the others on those after it.
    """

    def __init__(self, device: torch.device, control: Any, first: int = 0) -> None:
        self.device = device
        self.first = first
        self.control = control
        nccl = dist.get_backend() == "nccl"
        self.wire = device if nccl else torch.device("cpu")
        self.groups = {True: dist.new_group() if nccl else control, False: dist.new_group() if nccl else control}
        self.pending: dict[bool, deque[list[tuple[Any, Tensor]]]] = {True: deque(), False: deque()}

    def send(self, tensors: Sequence[Tensor], stage: int, *, forward: bool) -> None:
        """Send tensors to a stage; they are kept until ``settle`` or ``finish``."""
        sent = [tensor.detach().to(self.wire).contiguous() for tensor in tensors]
        rank, group = self.first + stage, self.groups[forward]
        self.pending[forward].append([(dist.isend(tensor, rank, group), tensor) for tensor in sent])

    def receive(self, shapes: Sequence[Shape], stage: int, *, forward: bool) -> list[Tensor]:
        """Wait for tensors of these shapes and dtypes from a stage."""
        received = []
        for shape, dtype in shapes:
            tensor = torch.empty(shape, dtype=dtype, device=self.wire)
            work: Any = dist.irecv(tensor, self.first + stage, self.groups[forward])
            work.wait()
            received.append(tensor.to(self.device))
        return received

    def announce(self, tensors: Sequence[Tensor], stage: int) -> None:
        """Tell a stage the shapes and dtypes of what it will be sent."""
        dist.send_object_list([shapes_of(tensors)], self.first + stage, self.control)

    def hear(self, stage: int) -> list[Shape]:
        """Wait for what a stage announces."""
        box: list[Any] = [None]
        dist.recv_object_list(box, self.first + stage, self.control)
        return list(box[0])

    def settle(self, *, forward: bool, but: int = 0) -> None:
        """Wait until what was sent in a direction has gone, ``but`` for the last ones, and free it."""
        pending = self.pending[forward]
        while len(pending) > but:
            for work, _ in pending.popleft():
                work.wait()

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        self.settle(forward=True)
        self.settle(forward=False)


def shapes_of(tensors: Sequence[Tensor]) -> list[Shape]:
    """Return shape and dtype of each tensor."""
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
