"""The base class of the built-in training problems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.dataset import Batch, Columns


class Workload:
    """One training problem: model, data, loss, optimizer, hyper-parameters and seed.

    A workload is an instance of a subclass. It is deterministic: each call gives the same weights and the same data. A
    trainer must reproduce the loss of a step's samples on one device, as its backend defines it.
    """

    name: ClassVar[str]
    exposes: ClassVar[str]  # the mistakes that it exposes, as a phrase
    needs: ClassVar[frozenset[str]] = frozenset()  # capabilities that a subject must declare
    exact: ClassVar[bool] = False  # every sum is exact in float32 in any order, if all divisors are powers of two
    narrow: ClassVar[bool] = False  # a few topologies, and ``precisions``, suffice to expose its mistakes
    precisions: ClassVar[tuple[str, ...]] = ("32", "16")
    gloo_only: ClassVar[str | None] = None  # the operation on its gradients that only gloo supports
    needs_epochs: ClassVar[str | None] = None  # why a trainer without epochs cannot train it
    blocks: ClassVar[int | None] = None  # modules that can be computed in sequence, each on its own device, if known
    whole_layers: ClassVar[str | None] = None  # why a layer must not be divided among devices
    experts: ClassVar[int] = 0  # number of experts in its model
    heads: ClassVar[int] = 0  # number of heads of each attention layer in its model
    needs_torch: ClassVar[tuple[int, int]] = (0, 0)  # the first torch release that has its optimizer
    sequence: ClassVar[int] = 0  # tokens of a sample, along dim 1 of all activations; 0: no such dimension
    couples_stages: ClassVar[bool] = False  # stages must agree on a norm, a tied weight, random numbers or a checkpoint
    mean_over_labels: ClassVar[bool] = False  # the loss: mean cross entropy of ``tokens`` over ``labels``, without -100
    adapters: ClassVar[bool] = False  # its model has ``Adapted`` layers, whose adapters alone are trained
    unused_parameters: ClassVar[bool] = False  # a step can leave parameters unused, on all or on some ranks

    batch_size: ClassVar[int] = 24
    steps_per_epoch: ClassVar[int] = 3
    epochs: ClassVar[int] = 2
    max_steps: ClassVar[int | None] = None
    accumulate: ClassVar[int] = 1
    clip_norm: ClassVar[float | None] = None
    validate_every: ClassVar[int | None] = None  # training batches
    interrupt_after: ClassVar[int | None] = None  # optimizer steps, after which new processes resume the training
    elastic: ClassVar[bool] = False  # whether a different number of processes resumes it
    shuffle: ClassVar[bool] = True
    seed: int = 1234
    locator: str | None = None  # where any process can load the user's own workload from

    def on(self, accelerator: str) -> Workload:
        """Return the workload for ``accelerator``; only performance workloads depend on it."""
        return self

    def build(self) -> nn.Module:
        """Return a new model. ``forward(batch)`` returns tensors with the batch in dim 0. Called with a fixed seed."""
        raise NotImplementedError

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``count`` samples, drawn with ``generator``, as one tensor per column."""
        raise NotImplementedError

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalar loss of a batch: the mean cross entropy of its classes ``y`` by default."""
        return nn.functional.cross_entropy(outputs, batch["y"])

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the workload's optimizer, by default plain SGD, which hides nothing."""
        return torch.optim.SGD(params, lr=0.1)

    def optimizers(self, params: Iterable[Any]) -> list[torch.optim.Optimizer]:
        """Return the workload's optimizers, by default one. ``params`` are in the model's order."""
        return [self.optimizer(params)]

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return the learning-rate schedule, or None. It steps once after each optimizer step taken."""
        return None

    def global_batch_size(self, devices: int) -> int:
        """Return the batch size over all devices: ``batch_size`` rounded up to a multiple of ``devices``."""
        return -(-self.batch_size // devices) * devices

    def steps(self, devices: int) -> int:
        """Return the optimizer steps of the whole training."""
        return self.max_steps or self.epochs * -(-self.steps_per_epoch // self.accumulate)

    def samples(self, devices: int) -> int:
        """Return the number of samples of an epoch, by default whole batches."""
        return self.steps_per_epoch * self.global_batch_size(devices)

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return a new model on the CPU, with the same weights at every call, whatever the state of the global RNG."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # the CPU's only: no device is initialised
            return self.build().to(dtype)

    def dataset(self, devices: int, dtype: torch.dtype = torch.float32) -> Columns:
        """Return the training data for a cell with this many devices."""
        return self._draw(self.samples(devices), self.seed + 1, dtype)

    def val_dataset(self, devices: int, dtype: torch.dtype = torch.float32) -> Columns:
        """Return held-out data, of a size that gives unequal shards."""
        return self._draw(self.global_batch_size(devices) + 5, self.seed + 2, dtype)

    def _draw(self, count: int, seed: int, dtype: torch.dtype) -> Columns:
        columns = self.columns(count, torch.Generator().manual_seed(seed))
        return Columns({k: v.to(dtype) if v.is_floating_point() else v for k, v in columns.items()})
