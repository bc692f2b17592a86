"""The base class of the built-in training problems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.dataset import Batch, Columns


class Workload:
    """One training problem: model, data, loss, optimizer, hyper-parameters and seed.

    A workload is a subclass. ``exposes`` says in a sentence which mistakes it is there for. ``needs`` names the
    capabilities a subject must declare beyond forward, backward, step, epochs and shuffling. ``exact`` promises that
    every sum is exact in float32 in any order, wherever all divisors are powers of two.

    A ``narrow`` workload is not trained over the whole matrix, but on the few topologies and the ``precisions`` that
    suffice for its mistakes. ``gloo_only`` says why only gloo can average its gradients, None where anything can.
    ``needs_epochs`` says what a trainer that knows no epoch cannot be asked, None where the workload can be asked.
    ``blocks`` is how many modules of its model can be computed one after the other, on a device each, None where that
    is not known. ``couples_stages`` says that devices with parts of the model each must agree on more than what these
    pass on: a norm, a tied weight, random numbers, a checkpoint. ``whole_layers`` says why a layer must not be divided
    among devices, None where it may. ``experts`` is how many experts its model has, and ``sequence`` how many tokens
    a sample has along dim 1 of all activations, 0 where there is no such dimension. ``mean_over_labels`` says that the
    loss is the mean cross entropy of the tokens in the column ``labels``, -100 left out, and that ``tokens`` are what
    they follow: some trainers can compute no other loss. ``unused_parameters`` says that a
    step may leave parameters unused, everywhere or on some ranks. ``validate_every`` counts training batches.

    Where there is an ``interrupt_after``, training is also stopped after so many optimizer steps and resumed by new
    processes; by another number of them where it is ``elastic``.

    ``locator`` is where a workload of the user's own can be loaded from, by any process; None of a built-in one.
    """

    name: ClassVar[str]
    exposes: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = False
    narrow: ClassVar[bool] = False
    precisions: ClassVar[tuple[str, ...]] = ("32", "16")
    gloo_only: ClassVar[str | None] = None
    needs_epochs: ClassVar[str | None] = None
    blocks: ClassVar[int | None] = None
    whole_layers: ClassVar[str | None] = None
    experts: ClassVar[int] = 0
    sequence: ClassVar[int] = 0
    couples_stages: ClassVar[bool] = False
    mean_over_labels: ClassVar[bool] = False
    unused_parameters: ClassVar[bool] = False

    batch_size: ClassVar[int] = 24
    steps_per_epoch: ClassVar[int] = 3
    epochs: ClassVar[int] = 2
    max_steps: ClassVar[int | None] = None
    accumulate: ClassVar[int] = 1
    clip_norm: ClassVar[float | None] = None
    validate_every: ClassVar[int | None] = None
    interrupt_after: ClassVar[int | None] = None
    elastic: ClassVar[bool] = False
    shuffle: ClassVar[bool] = True
    seed: int = 1234
    locator: str | None = None

    def on(self, accelerator: str) -> Workload:
        """Return the workload as it is on that accelerator: the same everywhere, unless it is there for its speed."""
        return self

    def build(self) -> nn.Module:
        """Return a new model; ``forward(batch)`` has the batch in dim 0. Called under a fixed seed."""
        raise NotImplementedError

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``count`` samples, drawn with ``generator``, one tensor a column."""
        raise NotImplementedError

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalar loss of a batch: the mean cross entropy of its classes ``y`` by default."""
        return nn.functional.cross_entropy(outputs, batch["y"])

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the workload's optimizer: plain SGD, which hides nothing, unless a workload says otherwise."""
        return torch.optim.SGD(params, lr=0.1)

    def optimizers(self, params: Iterable[Any]) -> list[torch.optim.Optimizer]:
        """Return the workload's optimizers over ``params``, which come in the model's order: one, unless it says so."""
        return [self.optimizer(params)]

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return the workload's learning-rate schedule, or None; it steps once after each optimizer step taken."""
        return None

    def global_batch_size(self, devices: int) -> int:
        """Return how many samples one step consumes over all devices: the least multiple that is enough."""
        return -(-self.batch_size // devices) * devices

    def steps(self, devices: int) -> int:
        """Return how many optimizer steps the whole training has."""
        return self.max_steps or self.epochs * -(-self.steps_per_epoch // self.accumulate)

    def samples(self, devices: int) -> int:
        """Return how many samples an epoch has: whole batches, unless a workload says otherwise."""
        return self.steps_per_epoch * self.global_batch_size(devices)

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return a new model on the cpu, with the same weights at every call, whatever the global RNG."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # the cpu's alone: no device is touched
            return self.build().to(dtype)

    def dataset(self, devices: int, dtype: torch.dtype = torch.float32) -> Columns:
        """Return the training data for a cell of so many devices."""
        return self._draw(self.samples(devices), self.seed + 1, dtype)

    def val_dataset(self, devices: int, dtype: torch.dtype = torch.float32) -> Columns:
        """Return held-out data; its size is a multiple of nothing, so that shards are unequal."""
        return self._draw(self.global_batch_size(devices) + 5, self.seed + 2, dtype)

    def _draw(self, count: int, seed: int, dtype: torch.dtype) -> Columns:
        columns = self.columns(count, torch.Generator().manual_seed(seed))
        return Columns({k: v.to(dtype) if v.is_floating_point() else v for k, v in columns.items()})
