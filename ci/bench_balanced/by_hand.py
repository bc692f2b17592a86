"""Minimal hand-written 1F1B for one model: plain sends and receives between two processes, with static shapes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from staged_models import Problem
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from turns import Pace


def train_by_hand(
    problem: Problem, stages: Sequence[Sequence[int]], micro_batches: int, steps: int, folder: Path, paces: list[Pace]
) -> None:
    """Train with one process for each of ``stages``, which are lists of layer numbers."""
    arguments = (problem, stages, micro_batches, steps, str(folder / "by-hand"), paces)
    start_processes(train_stage, arguments, len(stages), start_method="fork")  # type: ignore[no-untyped-call]


def train_stage(
    rank: int,
    problem: Problem,
    stages: Sequence[Sequence[int]],
    micro_batches: int,
    steps: int,
    meeting: str,
    paces: list[Pace],
) -> None:
    """Run one stage."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=len(stages))
    torch.manual_seed(0)
    network = problem.network()
    layers = [nn.Sequential(*(network[number] for number in numbers)) for numbers in stages]
    batches = problem.loader(steps)
    shapes = shapes_between(layers, next(iter(batches))[0].chunk(micro_batches)[0])
    stage = Stage(problem, layers[rank], rank, len(stages), micro_batches, shapes)
    del layers, network
    optimizer = problem.optimizer(stage.layers.parameters())
    paces[rank].follow(optimizer)
    for inputs, targets in batches:
        stage.train(inputs.chunk(micro_batches), targets.chunk(micro_batches))
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def shapes_between(layers: Sequence[nn.Module], inputs: Tensor) -> list[torch.Size]:
    """Return the shape of each stage's output for a micro-batch, except the last stage's."""
    shapes = []
    for layer in layers[:-1]:
        inputs = layer.eval()(inputs)
        layer.train()
        shapes.append(inputs.shape)
    return shapes


class Stage:
    """One stage's layers, and its training of a batch."""

    def __init__(
        self, problem: Problem, layers: nn.Module, rank: int, count: int, micro_batches: int, shapes: list[torch.Size]
    ) -> None:
        self.problem, self.layers, self.rank, self.count = problem, layers, rank, count
        self.micro_batches, self.shapes = micro_batches, shapes
        self.is_last = rank == count - 1
        self.sent: list[tuple[Any, Tensor]] = []

    def train(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Accumulate the gradients of a batch's mean loss."""
        passed: deque[tuple[Tensor, Tensor]] = deque()
        early = min(self.count - self.rank - 1, self.micro_batches)
        for number in range(early):
            passed.append(self.forward(inputs[number], targets[number]))
        for number in range(early, self.micro_batches):
            passed.append(self.forward(inputs[number], targets[number]))
            self.backward(*passed.popleft())
        while passed:
            self.backward(*passed.popleft())
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the received input, and the sent output or the loss."""
        if self.rank:
            inputs = torch.empty(self.shapes[self.rank - 1], requires_grad=True)
            dist.recv(inputs.detach(), self.rank - 1)
        outputs = self.layers(inputs)
        if self.is_last:
            return inputs, self.problem.loss(outputs, targets) / self.micro_batches
        self.send(outputs.detach(), self.rank + 1)
        return inputs, outputs

    def backward(self, inputs: Tensor, outputs: Tensor) -> None:
        """Receive the gradient of ``outputs``, unless they are the loss, and send that of ``inputs``."""
        gradient = None
        if not self.is_last:
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, self.rank + 1)
        torch.autograd.backward(outputs, gradient)
        if self.rank:
            assert inputs.grad is not None
            self.send(inputs.grad, self.rank - 1)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send without waiting."""
        tensor = tensor.contiguous()
        self.sent.append((dist.isend(tensor, rank), tensor))
