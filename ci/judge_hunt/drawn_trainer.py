"""The subject of the judge's hunt: it trains according to the draw in the file ``PLUMBLINE_DRAW``.

Without a mutation, it is right. Each place in its loop where a mutation can happen calls the ``Mutator``, which changes
nothing elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comm_hooks import HOOKS
from mutations import Mutation, Mutator
from reductions import sum_over_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from trainer_draws import TrainerDraw

from plumbline import subject
from plumbline.subjects.declare import CAPABILITIES

DRAW = "PLUMBLINE_DRAW"
"""The variable with the path of a JSON file with the fields of a ``trainer`` and of a ``mutation``, or null."""


@subject(
    name="drawn", backends=["none", "ddp"], precisions=["64", "32", "16", "bf16"], capabilities=sorted(CAPABILITIES)
)
def train(job: Any) -> None:
    """Train according to the draw."""
    values = json.loads(Path(os.environ[DRAW]).read_text("utf-8"))
    mutation = values["mutation"] and Mutation(**values["mutation"])
    _Training(job, TrainerDraw(**values["trainer"]), Mutator(mutation, job.rank)).fit()


class _Training:
    def __init__(self, job: Any, draw: TrainerDraw, mutator: Mutator) -> None:
        self.job, self.draw, self.mutator = job, draw, mutator
        self.steps = 0
        self.last = False
        self.model = self.wrapped = job.model()
        if job.world_size > 1:
            dist.init_process_group(job.comm)
        if draw.reduction == "ddp":
            self.wrapped = self._ddp()
        self._start()
        self.optimizers = [_implemented(one, draw.implementation) for one in job.optimizers(self.model.parameters())]
        for optimizer in self.optimizers:
            self._inside(optimizer)
        self.schedulers = [one for one in map(job.scheduler, self.optimizers) if one is not None]
        self.scaler = job.grad_scaler()
        if draw.reduction == "in-the-backward":
            for parameter in self._trained():
                parameter.register_post_accumulate_grad_hook(self._averaged_at_once)  # type: ignore[no-untyped-call]

    def _ddp(self) -> DistributedDataParallel:
        draw = self.draw
        wrapped = DistributedDataParallel(
            self.model,
            bucket_cap_mb=draw.bucket_cap_mb,
            find_unused_parameters=draw.find_unused,
            gradient_as_bucket_view=draw.bucket_view,
            static_graph=draw.static_graph,
        )
        if draw.hook != "none":
            wrapped.register_comm_hook(None, HOOKS[draw.hook])
        return wrapped

    def _start(self) -> None:
        named = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        if self.draw.broadcast_at_start and self.job.world_size > 1:
            for parameter in named.values():
                dist.broadcast(parameter, 0)
        for name, value in self.mutator.values("weights at the start", 0, named).items():
            named[name].copy_(value.clone())

    def fit(self) -> None:
        """Train to the end."""
        job = self.job
        for epoch in range(job.epochs):
            batches, number = list(self._batches(epoch)), 0
            for start in range(0, len(batches), job.accumulate):
                window = batches[start : start + job.accumulate]
                if self.draw.zero == "before":
                    self._zero()
                for index, batch in enumerate(window):
                    self._micro_batch(batch, index, window)
                    if index == len(window) - 1:
                        self._end_of_window(window)
                    number += 1
                    due = job.validate_every and number % job.validate_every == 0
                    if due and self.mutator.times("evaluation", self.steps - 1):
                        self._evaluate()

    def _batches(self, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's batches of an epoch; each global batch has the same samples in every way of sampling."""
        job = self.job
        if self.draw.sampler == "distributed":
            sampler: DistributedSampler[Any] = DistributedSampler(
                job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed
            )
            sampler.set_epoch(epoch)
            own = list(sampler)
            shares = [own[first : first + job.batch_size] for first in range(0, len(own), job.batch_size)]
        else:
            shares = list(_shares(self.draw.sampler, job, epoch))
        before = shares[0]
        for number, share in enumerate(shares):
            step = self.steps_before(epoch, len(shares)) + number // job.accumulate
            share, before = self._samples(step, share, before), share
            yield self._changed(step, job.dataset.batch(share))

    def steps_before(self, epoch: int, batches: int) -> int:
        """Return the number of steps in the epochs before this one."""
        steps: int = epoch * -(-batches // self.job.accumulate)
        return steps

    def _samples(self, step: int, share: list[int], before: list[int]) -> list[int]:
        mutation = self.mutator.mutation
        happens = mutation is not None and mutation.happens("samples", step) and mutation.rank in (None, self.job.rank)
        if mutation is None or not happens:
            return share
        if mutation.operation == "delayed":
            return before[: len(share)]
        half = -(-len(share) // 2)
        return share[:-1] or share if mutation.operation == "dropped" else (share[:half] * 2)[: len(share)]

    def _changed(self, step: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = self.mutator.values("inputs", step, {"x": batch["x"]})
        targets: dict[str, Tensor] = {name: batch[name] for name in ("y", "target", "labels") if name in batch}
        return type(batch)({**batch, **inputs, **self.mutator.values("targets", step, targets)})

    def _micro_batch(self, batch: dict[str, Tensor], place: int, window: list[Any]) -> None:
        job, draw = self.job, self.draw
        self.last = place == len(window) - 1
        if place == 0:
            self.losses: list[Tensor] = []
            self.sums: dict[str, Tensor] = {}
        if job.world_size > 1 and draw.reduction != "ddp":
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        with self._waiting(place):
            with job.autocast():
                loss = job.loss(self.wrapped(batch), batch)
            loss = self.mutator.values("loss", self.steps, {"loss": loss})["loss"]
            if draw.accumulation in ("loss", "one-backward"):
                loss = loss / len(window)
            if draw.reduction != "ddp" and draw.divided == "loss":
                loss = loss / job.world_size
            loss = self.scaler.scale(loss)
            if draw.accumulation == "one-backward":
                self.losses.append(loss)
                if self.last:
                    torch.autograd.backward(torch.stack(self.losses).sum())
            elif draw.accumulation == "own-sum":
                self._add(loss)
            else:
                torch.autograd.backward(loss)

    def _waiting(self, place: int) -> AbstractContextManager[Any]:
        """Return the context in which DDP does not average yet."""
        due = self.last or self.draw.sync == "every" or (self.draw.sync == "odd" and place % 2 == 1)
        if due or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        waiting: AbstractContextManager[Any] = self.wrapped.no_sync()
        return waiting

    def _add(self, loss: Tensor) -> None:
        trained = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        made = torch.autograd.grad(loss, tuple(trained.values()), allow_unused=True)
        for name, value in zip(trained, made, strict=True):
            if value is not None:
                self.sums[name] = self.sums[name] + value if name in self.sums else value
        if self.last:
            for name, value in self.sums.items():
                trained[name].grad = value

    def _averaged_at_once(self, parameter: Tensor) -> None:
        if self.last and parameter.grad is not None:
            parameter.grad = self._mean([_dense(parameter.grad)], lambda parts: dist.all_reduce(parts[0]))[0]

    def _mean(self, gradients: list[Tensor], add: Any) -> list[Tensor]:
        """Return the mean of dense gradients over the ranks; ``add`` sums them in place."""
        world = self.job.world_size
        parts = [one / world if self.draw.divided == "before" else one.clone() for one in gradients]
        add(parts)
        return [part / world if self.draw.divided == "after" else part for part in parts]

    def _reduce(self) -> None:
        draw, mutator, step = self.draw, self.mutator, self.steps
        if draw.reduction in ("ddp", "in-the-backward"):
            return
        self._set(mutator.values("gradients before the reduction", step, self._gradients()))
        if draw.reduction == "none":
            return
        gradients = {name: _dense(value) for name, value in self._gradients().items()}
        # All ranks take part in all reductions: one that should leave a reduction out keeps its own values.
        for number in range(max(1, mutator.times("reduction", step, on_any_rank=True))):
            mean = self._mean(list(gradients.values()), lambda parts: sum_over_ranks(draw.reduction, parts, draw.chunk))
            if number < mutator.times("reduction", step):
                gradients = dict(zip(gradients, mean, strict=True))
        self._set(gradients)

    def _end_of_window(self, window: list[Any]) -> None:
        job, mutator, step = self.job, self.mutator, self.steps
        self._reduce()
        if self.draw.accumulation in ("gradient", "own-sum"):
            self._set({name: value / len(window) for name, value in self._gradients().items()})
        self._set(mutator.values("gradients after the reduction", step, self._gradients()))
        if job.clip_norm is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            if mutator.times("clipping", step):
                self._clip(job.clip_norm * mutator.factor("clipping", step))
        self._change_state()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        if not self.scaler.get_scale() < scale:
            for scheduler in self.schedulers:
                for _ in range(mutator.times("schedule", step)):
                    scheduler.step()
        if self.draw.zero != "before":
            self._zero()
        self._change_buffers()
        self.steps += 1

    def _zero(self) -> None:
        if not self.mutator.times("zeroing", self.steps):
            return
        if self.draw.zero == "model":
            self.model.zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.draw.zero != "zero")

    def _clip(self, norm: float) -> None:
        if self.draw.clipping == "hand":
            gradients = self._gradients()
            length = torch.stack([value.norm() for value in gradients.values()]).norm()
            factor = (norm / (length + 1e-6)).clamp(max=1.0)
            self._set({name: value * factor for name, value in gradients.items()})
        else:
            foreach = True if self.draw.clipping == "foreach" else None
            nn.utils.clip_grad_norm_(self.model.parameters(), norm, foreach=foreach)

    def _trained(self) -> list[nn.Parameter]:
        return [one for one in self.model.parameters() if one.requires_grad]

    def _gradients(self) -> dict[str, Tensor]:
        return {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}

    def _set(self, gradients: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name]

    def _change_state(self) -> None:
        every = {
            f"{number}.{index}.{key}": value
            for number, optimizer in enumerate(self.optimizers)
            for index, state in enumerate(optimizer.state.values())
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim() and value.is_floating_point()
        }
        for name, value in self.mutator.values("optimizer state", self.steps, every).items():
            every[name].copy_(value.clone())

    def _change_buffers(self) -> None:
        every = {name: value for name, value in self.model.named_buffers() if value.is_floating_point()}
        for name, value in self.mutator.values("buffers", self.steps, every).items():
            every[name].copy_(value.clone())

    def _inside(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the mutator change the update within the step, like a wrong optimizer."""
        if self.mutator.mutation is None or self.mutator.mutation.place not in ("update", "weights"):
            return
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        named = {name: one for name, one in self.model.named_parameters() if id(one) in own}
        before: dict[str, Tensor] = {}

        def remember(*_: Any) -> None:
            before.update({name: one.detach().clone() for name, one in named.items()})

        def change(*_: Any) -> None:
            # Only the first of several optimizers is changed, because `delayed` remembers only one step.
            if optimizer is not self.optimizers[0]:
                return
            updates = {name: one.detach() - before[name] for name, one in named.items()}
            for name, value in self.mutator.values("update", self.steps, updates).items():
                if not torch.equal(value, updates[name]):
                    named[name].detach().copy_(before[name] + value)
            weights = {name: one.detach().clone() for name, one in named.items()}
            for name, value in self.mutator.values("weights", self.steps, weights).items():
                named[name].detach().copy_(value)

        optimizer.register_step_pre_hook(remember)
        optimizer.register_step_post_hook(change)

    @torch.no_grad()
    def _evaluate(self) -> None:
        job, everything = self.job, range(len(self.job.val_dataset))
        share = everything if self.draw.evaluation == "whole" else everything[job.rank :: job.world_size]
        self.model.train(not self.mutator.times("evaluation mode", self.steps - 1))
        if len(share):
            batch = job.val_dataset.batch(share)
            with job.autocast():
                job.loss(self.model(batch), batch)
        self.model.train()


def _shares(sampler: str, job: Any, epoch: int) -> Iterator[list[int]]:
    """Yield this rank's samples of each batch, sharded by hand; pad the last batch like DistributedSampler."""
    count, world = len(job.dataset), job.world_size
    generator = torch.Generator().manual_seed(7 * epoch + job.seed)
    order = torch.randperm(count, generator=generator).tolist() if job.shuffle else list(range(count))
    order += order[: -count % world]
    for number, first in enumerate(range(0, len(order), job.global_batch_size)):
        batch = order[first : first + job.global_batch_size]
        rank = (job.rank + number) % world if sampler == "rotated" else job.rank
        size = len(batch) // world
        own = batch[rank::world] if sampler == "strided" else batch[rank * size : (rank + 1) * size]
        yield own[::-1] if sampler == "reversed" else own


def _implemented(optimizer: torch.optim.Optimizer, implementation: str) -> torch.optim.Optimizer:
    """Return the same optimizer in another of torch's implementations."""
    if implementation == "given":
        return optimizer
    flags = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    settings = {name: value for name, value in optimizer.defaults.items() if name not in ("differentiable",)}
    known = set(type(optimizer).__init__.__code__.co_varnames)
    settings = {name: value for name, value in {**settings, **flags}.items() if name in known}
    groups = [{k: v for k, v in group.items() if k not in ("foreach", "fused")} for group in optimizer.param_groups]
    return type(optimizer)(groups, **settings)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
