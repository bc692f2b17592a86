"""The trace of one launch: what each rank recorded, without any judgement of it.

Tensors are torch's. This module only carries them, so it imports torch for annotations alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plumbline.core.outcome import Outcome
from plumbline.evidence.training_record import SkippedStep, StepRecord

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
"""Named tensors: the name of a parameter or buffer in ``job.model()`` to its value, on the cpu.

A rank records sharded weights and gradients as ``Shard``, and large ones as ``StoredTensor``. Reading the trace of a
launch replaces both by whole tensors.
"""


STORE_ABOVE = 2**16
"""Weights and gradients with more entries than this are written to the launch's tensor store by default."""


Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a block of a tensor begins, and its shape."""


def block_index(block: Block) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(*block, strict=True))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in its launch's tensor store, where equal tensors of several ranks and steps are stored once.

    ``fingerprint`` is a hash of its bits: equal tensors of one shape and dtype have the same one, others a different
    one. ``dtype`` is torch's name, ``float32``.
    """

    fingerprint: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's block of a tensor of ``shape``; ``begin`` is the index of its first entry in that tensor.

    A shard of a flattened tensor is a run of entries: ``values`` has one dimension, and ``begin`` one number.
    ``values`` is on the cpu, and may be empty. ``ranks`` are the ranks whose blocks make up the tensor, including this
    one; with several replicas they are the ranks of one replica. ``ranks`` is empty if the rank does not hold a block,
    but for example its part of a sum over ranks.
    """

    values: Tensor
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def space(self) -> tuple[int, ...]:
        """The shape of which this is a block: that of the tensor, or of the flattened tensor."""
        return self.shape if len(self.begin) == len(self.shape) else (math.prod(self.shape),)


@dataclass(frozen=True)
class MicroBatch:
    """One pass of one process: the samples of each of its devices, and the samples of the loss.

    ``forwards``: the sample ids of each forward call of the model, in order; one call for each device.
    ``loss``: the sample ids that ``job.loss`` got, or None if the subject has a loss function of its own.
    ``drawn``: the random masks of the model's layers, by name, a row for each sample of ``forwards``. Masks that a
    recomputation in the backward drew are under ``"<name> again"`` if they differ.
    """

    forwards: tuple[tuple[int, ...], ...]
    loss: tuple[int, ...] | None = None
    drawn: Tensors = field(default_factory=dict)

    @property
    def samples(self) -> tuple[int, ...]:
        """The sample ids of all forwards, in order."""
        return tuple(i for share in self.forwards for i in share)


@dataclass(frozen=True)
class Step:
    """One optimizer step on one rank, or one that the loss scaler decided to skip.

    ``before`` and ``after`` are the weights around it. ``gradients`` are those that the optimizer got: unscaled,
    averaged, clipped. A parameter without a gradient is absent. ``learning_rates`` has one entry for each parameter
    group. ``scale`` is the loss scale, None without a scaler. ``buffers`` are the model's at the step's first forward,
    after a trainer that shares them has done so.

    Several optimizers, each with its own part of the model, make one step. If they take ``turns``, each with its own
    pass over the same samples, ``turns`` has the names of their parameters, in order: the gradients of a later
    optimizer are taken at the weights that the earlier ones left. It is empty if all of them share one pass. If they
    ``alternate``, each micro-batch has its passes for all of them before the next one: only the passes over the last
    micro-batch come after the steps of earlier optimizers.

    A GradScaler decides for each optimizer separately. If it skipped one but not another, the step counts as taken, and
    ``held_back`` has the gradients of the skipped one, which are not in ``gradients``.

    If an optimizer steps master weights, ``before`` and ``after`` are the master weights. ``off_masters`` has, by
    parameter name, the largest relative error of the model's own weights before the step, for parameters in which they
    are not the nearest numbers of their dtype to the master weights.
    """

    micro_batches: tuple[MicroBatch, ...]
    before: Tensors
    gradients: Tensors
    after: Tensors
    learning_rates: tuple[float, ...]
    skipped: bool = False
    scale: float | None = None
    buffers: Tensors = field(default_factory=dict)
    turns: tuple[tuple[str, ...], ...] = ()
    alternate: bool = False
    held_back: Tensors = field(default_factory=dict)
    off_masters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TraceStep(StepRecord):
    """A step of a subject in the form that all checks can read."""

    step: Step = field(kw_only=True)

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.step.before)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(value.shape) for value in self.step.before.values())

    @property
    def gradient_norm(self) -> float:
        return math.hypot(*(float(value.double().norm()) for value in self.step.gradients.values()))

    @property
    def learning_rates(self) -> tuple[float, ...]:
        return self.step.learning_rates

    @property
    def skipped(self) -> bool:
        return self.step.skipped

    @property
    def passes(self) -> int:
        return len(self.step.micro_batches)


@dataclass(frozen=True)
class Evaluation:
    """Forwards without gradients, with no training between them: an evaluation, or a rank's share of one.

    It took place after ``step`` optimizer steps and ``micro_batches`` of the next one. ``training``: whether the model
    was in training mode in any of them.
    """

    step: int
    micro_batches: int
    samples: tuple[int, ...]
    training: bool


@dataclass(frozen=True)
class Logged:
    """A metric that was reported after ``step`` optimizer steps and ``micro_batches`` of the next one."""

    step: int
    name: str
    value: float
    micro_batches: int = 0


def same(left: Tensors, right: Tensors) -> bool:
    """Return whether two sets of tensors have the same names and equal values (NaN equals NaN)."""
    return left.keys() == right.keys() and all(_equal(left[name], right[name]) for name in left)


def _equal(left: Tensor, right: Tensor) -> bool:
    if left.equal(right):
        return True
    missing = left.isnan()
    both = bool(missing.any()) and missing.equal(right.isnan())
    return both and left.masked_fill(missing, 0).equal(right.masked_fill(missing, 0))


CONNECTION_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Socket closed", "Timed out waiting", "recv, timeout",
)  # fmt: skip
"""Parts of the errors that torch.distributed raises on a rank that waits for a rank that has ended."""


@dataclass(frozen=True)
class RankTrace:
    """The record of one rank. ``world_size`` is that of torch.distributed, 1 if there was no group.

    ``error`` is what ``train`` raised, and ``failed_at`` when (seconds since the epoch); ``stack`` has its call stack,
    one line for each call, the innermost first.
    ``torch`` is the rank's version of torch, "" if the trace is older than this field.
    ``holds_nothing`` says that the rank held no parameter while it trained, such as a stage that only computes.
    ``final`` and ``final_buffers`` are the model's when ``train`` returned; ``final`` is None without a model.
    ``devices`` has the device types of the model's outputs; it is empty if no outputs were tensors.
    ``blocks`` has the blocks of parameters that the rank held, by name, once whole tensors have replaced shards.
    """

    rank: int
    world_size: int
    steps: tuple[Step, ...]
    error: str | None = None
    failed_at: float | None = None
    final: Tensors | None = None
    final_buffers: Tensors = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    logged: tuple[Logged, ...] = ()
    stack: str = ""
    torch: str = ""
    blocks: dict[str, Block] = field(default_factory=dict)
    holds_nothing: bool = False
    devices: tuple[str, ...] = ()

    @property
    def step_records(self) -> list[TraceStep]:
        """The steps in the form that all checks can read."""
        return [TraceStep(self.rank, number, step=step) for number, step in enumerate(self.steps)]

    @property
    def skipped_steps(self) -> Iterator[SkippedStep]:
        """The steps that a loss scaler skipped, and the steps in which it held back some of several optimizers."""
        for number, step in enumerate(self.steps):
            if not step.skipped and not step.held_back:
                continue
            gradients, still = (step.held_back, step.held_back) if step.held_back else (step.gradients, step.after)
            moved = [name for name in still if not same({name: step.before[name]}, {name: step.after[name]})]
            yield SkippedStep(
                self.rank,
                number,
                f"{len(moved)} of {len(still)} parameters" if moved else "",
                any(not value.isfinite().all() for value in gradients.values()) if gradients else None,
                next(iter(moved), None),
                step.scale,
                self.steps[number + 1].scale if number + 1 < len(self.steps) else None,
            )

    @property
    def has_lost_connection(self) -> bool:
        """Whether this rank raised because another rank had ended."""
        return any(words in (self.error or "") for words in CONNECTION_LOST)

    @property
    def tensor_sets(self) -> Iterator[Tensors]:
        """Every recorded set of weights or gradients: whole tensors, shards, or references."""
        for step in self.steps:
            yield from (step.before, step.gradients, step.after, step.held_back)
        if self.final is not None:
            yield self.final


@dataclass(frozen=True)
class Exit:
    """How a rank without a trace ended: crashed, timed out, or unable to write it (errored); ``message`` says why.

    Also describes a rank that left a trace and then hung.

    ``step`` is the number of optimizer steps that it had done. ``waits_in`` names the collective in which it waited for
    other ranks, None if none is known. ``stack`` has its call stack, one line for each call, the innermost first;
    ``said`` is the end of its output.
    """

    outcome: Outcome
    message: str
    step: int | None = None
    waits_in: str | None = None
    stack: str = ""
    said: str = ""


@dataclass(frozen=True)
class Trace:
    """The trace of a whole launch, ordered by rank; ``exits`` has the ranks that left none.

    ``hung`` has the ranks that left a trace and then had to be ended, because they hung.

    If the workload has an interruption, two more launches belong to it: ``saved`` stopped in the middle and left a
    checkpoint, from which ``resumed`` continued.
    """

    ranks: tuple[RankTrace, ...]
    exits: dict[int, Exit] = field(default_factory=dict)
    seconds: float | None = None
    saved: Trace | None = None
    resumed: Trace | None = None
    hung: dict[int, Exit] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every rank left a trace, and none of them raised."""
        return not self.exits and not any(rank.error for rank in self.ranks)

    def elsewhere(self, accelerator: str) -> list[RankTrace]:
        """Return the ranks whose model computed on other types of devices than this one."""
        return [rank for rank in self.ranks if rank.devices and accelerator not in rank.devices]
