"""A small recorder for tests: it calls observers like the recorder of a user's script, and keeps their notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from plumbline.check.evidence.training import BackwardPass, Facts, Parameter, RecordedRank, RecordedStep, segment
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.pause import paused


class Observed:
    """Records a training function that has one optimizer at a time, and modules that it names."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers
        self.passes: list[BackwardPass] = []
        self.steps: list[RecordedStep] = []
        self.numbers: dict[int, int] = {}
        self.count = 0
        for observer in observers:
            observer.start()

    def follow(self, module: nn.Module) -> None:
        """Announce the start and end of each forward of a module; hooks run inside a wrapper."""

        def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                for observer in self.observers:
                    observer.forward_begins(module, args, kwargs)

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                for observer in self.observers:
                    observer.forward_ends()

        module.register_forward_pre_hook(begins, with_kwargs=True)
        module.register_forward_hook(ends)

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        local: dict[int, Tensor] = {}
        parameters = parameters_of(optimizer)

        def arrived(place: int) -> Callable[[Tensor], None]:
            def note(gradient: Tensor) -> None:
                local[place] = segment(_own(gradient))

            return note

        hooks = [p.register_hook(arrived(index)) for index, p in enumerate(parameters) if p.requires_grad]
        for observer in self.observers:
            observer.backward_begins(self.count, [loss])
        loss.backward()
        for hook in hooks:
            hook.remove()
        vector = torch.cat([local.get(i, torch.zeros_like(segment(_own(p)))) for i, p in enumerate(parameters)])
        facts = {o.name: made for o in self.observers if (made := o.backward_ends(self.count)) is not None}
        self.passes.append(BackwardPass(self.count, vector, facts=facts))
        self.count += 1

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = parameters_of(optimizer)
        received = torch.cat([_received(p) for p in parameters])
        with torch.no_grad(), paused():
            for observer in self.observers:
                observer.before_step(optimizer)
        optimizer.step()
        with torch.no_grad(), paused():
            made = {o.name: o.after_step(optimizer, skipped=False) for o in self.observers}
        facts: Facts = {name: noted for name, noted in made.items() if noted is not None}
        number = self.numbers[id(optimizer)] = self.numbers.get(id(optimizer), -1) + 1
        names = [Parameter(f"p{i}", tuple(_own(p).shape), "float32") for i, p in enumerate(parameters)]
        place = list(self.numbers).index(id(optimizer))
        self.steps.append(RecordedStep(place, number, tuple(names), received, tuple(self.passes), facts=facts))
        self.passes = []
        optimizer.zero_grad()

    def finish(self) -> RecordedRank:
        for observer in self.observers:
            observer.stop()
        facts = {o.name: made for o in self.observers if (made := o.final_facts()) is not None}
        group = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if group else (0, 1)
        return RecordedRank(rank, world, tuple(self.steps), facts)


def _received(parameter: Tensor) -> Tensor:
    own = segment(_own(parameter if parameter.grad is None else parameter.grad))
    return own.fill_(torch.nan) if parameter.grad is None else own


def _own(tensor: Any) -> Tensor:
    """Return this rank's part of a distributed tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
