"""A training loop whose optimizer steps are observed, for tests of observers; and rank functions on gloo."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plumbline.check.evidence.training import (
    BackwardPass,
    Parameter,
    RecordedRank,
    RecordedStep,
    RecordedTraining,
    segment,
)
from plumbline.check.rank.optimizer.clipping import ClippingObserver
from plumbline.check.rank.optimizer.learning_rate import LearningRate
from plumbline.check.rank.optimizer.loss_scale import LossScale
from plumbline.check.rank.optimizer.precision_used import PrecisionUsed
from plumbline.check.rank.optimizer.update_replay import UpdateReplay
from plumbline.recording.grad_scaler import skips_in_its_kernel
from plumbline.recording.observer import Observer
from plumbline.recording.optimizer_steps import OptimizerSteps
from plumbline.recording.parameters import follow_added_parameters, parameters_of
from plumbline.recording.sharding import local

LOSS_SCALE = LossScale()
OBSERVERS: tuple[Observer, ...] = (
    UpdateReplay(),
    LOSS_SCALE,
    ClippingObserver(LOSS_SCALE),
    LearningRate(),
    PrecisionUsed(),
)
for observer in OBSERVERS:
    observer.install()
follow_added_parameters(lambda optimizer: [one.optimizer_made(optimizer) for one in OBSERVERS])


class Watch:
    """Stands in for the recorder: calls observers and keeps steps. All passes since a step belong to the next."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []
        self._passes: list[BackwardPass] = []
        self._count = 0
        self._numbers: dict[int, int] = {}
        self._order: list[Optimizer] = []
        self._received: Tensor | None = None

    def backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        number, self._count = self._count, self._count + 1
        for one in OBSERVERS:
            one.backward_begins(number, ())
        backward(*args, **kwargs)
        facts = {one.name: noted for one in OBSERVERS if (noted := one.backward_ends(number)) is not None}
        self._passes.append(BackwardPass(number, torch.zeros(0), scale=LOSS_SCALE.scale, facts=facts))

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        pass

    def gradients_ready(self, optimizer: Optimizer) -> None:
        self._prepare(optimizer)

    def step_ends(self, optimizer: Optimizer) -> None:
        self._complete(optimizer, skipped=skips_in_its_kernel(optimizer))

    def skipped(self, optimizer: Optimizer) -> None:
        self._prepare(optimizer)
        self._complete(optimizer, skipped=True)

    def _prepare(self, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        self._received = torch.cat([_received(parameter) for parameter in parameters])
        for one in OBSERVERS:
            one.before_step(optimizer)

    def _complete(self, optimizer: Optimizer, *, skipped: bool) -> None:
        if optimizer not in self._order:
            self._order.append(optimizer)
        place = self._order.index(optimizer)
        number = self._numbers[place] = self._numbers.get(place, -1) + 1
        facts = {one.name: f for one in OBSERVERS if (f := one.after_step(optimizer, skipped=skipped)) is not None}
        parameters = tuple(
            Parameter(f"p{i}", tuple(p.shape), str(p.dtype)) for i, p in enumerate(parameters_of(optimizer))
        )
        assert self._received is not None
        passes = tuple(replace(one, local=torch.zeros_like(self._received)) for one in self._passes)  # it sees none
        step = RecordedStep(place, number, parameters, self._received, passes, (), skipped, facts)
        self.steps.append(step)
        self._passes = []

    def rank(self, rank: int = 0, world_size: int = 1) -> RecordedRank:
        facts = {one.name: noted for one in OBSERVERS if (noted := one.final_facts()) is not None}
        return RecordedRank(rank, world_size, tuple(self.steps), facts)


def _received(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.full((min(parameter.numel(), 64),), math.nan, dtype=torch.float64)
    return segment(local(parameter.grad).to_dense())


@contextmanager
def watching() -> Iterator[Watch]:
    watch = Watch()
    steps = OptimizerSteps(watch)
    backward = torch.autograd.backward
    torch.autograd.backward = lambda *args, **kwargs: watch.backward(backward, *args, **kwargs)
    outside = torch._compile._disable_dynamo
    handles = [
        register_optimizer_step_pre_hook(outside(lambda *args: steps.before(*args))),
        register_optimizer_step_post_hook(outside(lambda *args: steps.after(*args))),
    ]
    LOSS_SCALE.on_skipped = watch.skipped
    for one in OBSERVERS:
        one.start()
    try:
        yield watch
    finally:
        torch.autograd.backward = backward
        for handle in handles:
            handle.remove()
        for one in OBSERVERS:
            one.stop()
            assert not getattr(one, "error", ""), getattr(one, "error", "")


def recorded(script: Callable[[], object]) -> RecordedTraining:
    """Return the recording of a script in this process."""
    torch.manual_seed(0)
    with watching() as watch:
        script()
    return RecordedTraining((watch.rank(),))


def recorded_on_ranks(script: Callable[[int], object], ranks: int = 2) -> RecordedTraining:
    """Return the recordings of a script on forked ranks with a gloo group; it is called with the rank."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                _run(script, rank, ranks, folder)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * ranks, codes
        loaded = (torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks))
        return RecordedTraining(tuple(loaded))


def _run(script: Callable[[int], object], rank: int, ranks: int, folder: str) -> None:
    """Run a rank, and end its process without pytest's exit handlers."""
    code = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        torch.manual_seed(0)
        with watching() as watch:
            script(rank)
        torch.save(watch.rank(rank, ranks), f"{folder}/{rank}")
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def small_model(*sizes: int) -> nn.Sequential:
    """A network of linear layers, in float32."""
    torch.manual_seed(1)
    given = sizes or (6, 9, 4)
    layers = [nn.Linear(before, after) for before, after in pairwise(given)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])


def loss_of(model: nn.Module, seed: int = 0, size: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(8, size, generator=generator)).square().sum()
