"""What a training problem is to the judge and to a job, wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plumbline.workloads.dataset import Columns


class Problem(Protocol):
    """One training problem: model, data, loss, optimizers, schedule and hyper-parameters.

    A built-in ``Workload`` is one implementation. Everything is deterministic: each call gives the same weights and
    the same data. ``devices`` is the number of devices over all nodes, on which data and steps may depend.

    The contract of the loss: ``loss`` takes the outputs for any set of samples and their batch, and what it returns for
    the samples of one step on one device is what the subject has to reproduce, or what its backend makes of it, where
    the loss couples samples or its shares differ in weight. Where ``exact``, every sum is exact in float32 in any
    order, wherever all divisors are powers of two.
    """

    @property
    def name(self) -> str:
        """What records and reports call it."""

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that a subject must declare."""

    @property
    def exact(self) -> bool:
        """Whether results are equal bit for bit."""

    @property
    def seed(self) -> int:
        """The seed of weights, data and order."""

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has an order of its own."""

    @property
    def epochs(self) -> int:
        """How often all samples are used."""

    @property
    def steps_per_epoch(self) -> int:
        """How many batches an epoch has; ``accumulate`` of them are one optimizer step."""

    @property
    def max_steps(self) -> int | None:
        """After how many optimizer steps training ends whatever the epochs, None where they decide."""

    @property
    def accumulate(self) -> int:
        """How many micro-batches an optimizer step has."""

    @property
    def clip_norm(self) -> float | None:
        """The norm to which the gradient is clipped, None where it is not."""

    @property
    def validate_every(self) -> int | None:
        """After how many training batches an evaluation is due, None where none is."""

    @property
    def unused_parameters(self) -> bool:
        """Whether a step may leave parameters unused, everywhere or on some ranks."""

    @property
    def interrupt_after(self) -> int | None:
        """After how many optimizer steps training is interrupted and resumed, None where it is not."""

    @property
    def elastic(self) -> bool:
        """Whether it is resumed on another number of devices."""

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return a new model on the cpu, with the same weights at every call, whatever the global RNG."""

    def dataset(self, devices: int, dtype: torch.dtype = torch.float32) -> Columns:
        """Return the training data."""

    def val_dataset(self, devices: int, dtype: torch.dtype = torch.float32) -> Columns:
        """Return held-out data."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the scalar loss of the samples in ``batch``, of which the model returned ``outputs``."""

    def optimizers(self, params: Iterable[Any]) -> list[torch.optim.Optimizer]:
        """Return the optimizers over ``params``, which come in the model's order."""

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return the learning-rate schedule, None where there is none; it steps once after each step taken."""

    def global_batch_size(self, devices: int) -> int:
        """Return how many samples one batch has over all devices."""

    def steps(self, devices: int) -> int:
        """Return how many optimizer steps the whole training has."""
