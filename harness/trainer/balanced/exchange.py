"""What travels between neighboring stages: activations forward, their gradients backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Shape = tuple[tuple[int, ...], torch.dtype]


class Exchange:
    """Sends to and receives from neighboring stages, in order; sending does not wait.

    Activations and gradients have a process group each: under NCCL the two directions between a pair of ranks would
    otherwise wait for one another. ``control`` is a gloo group for shapes.
    """

    def __init__(self, device: torch.device, control: Any) -> None:
        self.device = device
        self.control = control
        nccl = dist.get_backend() == "nccl"
        self.wire = device if nccl else torch.device("cpu")
        self.groups = {True: dist.new_group() if nccl else control, False: dist.new_group() if nccl else control}
        self.pending: list[tuple[Any, Tensor]] = []

    def send(self, tensors: Sequence[Tensor], rank: int, *, forward: bool) -> None:
        """Send tensors to a rank; they are kept until ``finish``."""
        for tensor in tensors:
            sent = tensor.detach().to(self.wire).contiguous()
            self.pending.append((dist.isend(sent, rank, self.groups[forward]), sent))

    def receive(self, shapes: Sequence[Shape], rank: int, *, forward: bool) -> list[Tensor]:
        """Wait for tensors of these shapes and dtypes from a rank."""
        received = []
        for shape, dtype in shapes:
            tensor = torch.empty(shape, dtype=dtype, device=self.wire)
            work: Any = dist.irecv(tensor, rank, self.groups[forward])
            work.wait()
            received.append(tensor.to(self.device))
        return received

    def announce(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Tell a rank the shapes and dtypes of what it will be sent."""
        dist.send_object_list([shapes_of(tensors)], rank, self.control)

    def hear(self, rank: int) -> list[Shape]:
        """Wait for what a rank announces."""
        box: list[Any] = [None]
        dist.recv_object_list(box, rank, self.control)
        return list(box[0])

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


def shapes_of(tensors: Sequence[Tensor]) -> list[Shape]:
    """Return shape and dtype of each tensor."""
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
