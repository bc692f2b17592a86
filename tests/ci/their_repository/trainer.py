"""A user's trainer: data parallel, with gradient accumulation, clipping and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Loss = Callable[[nn.Module, object], torch.Tensor]


@dataclass
class Options:
    accumulate: int = 1
    clip: float | None = None
    save_to: str = ""
    save_every: int = 0


class Trainer:
    """Trains a model on all ranks of an existing process group."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, options: Options) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.options = options
        self.parallel = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
        self.step = 0

    def fit(self, batches: Iterable[object]) -> None:
        group: list[object] = []
        for batch in batches:
            group.append(batch)
            if len(group) == self.options.accumulate:
                self._train(group)
                group = []
        if group:
            self._train(group)

    def _train(self, group: list[object]) -> None:
        self.optimizer.zero_grad()
        for index, batch in enumerate(group):
            self._backward(batch, len(group), is_last=index == len(group) - 1)
        if self.options.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.step += 1
        if self.options.save_every and self.step % self.options.save_every == 0:
            self.save()

    def _backward(self, batch: object, count: int, *, is_last: bool) -> None:
        if is_last or self.parallel is self.model:
            (self.loss(self.parallel, batch) / count).backward()
            return
        with self.parallel.no_sync():
            (self.loss(self.parallel, batch) / count).backward()

    def save(self) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        os.makedirs(self.options.save_to, exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, os.path.join(self.options.save_to, f"{self.step}.pt"))

    def resume(self, file: str) -> None:
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def start() -> tuple[int, int]:
    """Join the launcher's process group; return this rank and the number of ranks."""
    if "RANK" not in os.environ:
        return 0, 1
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def end() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
