"""The trace of one launch: what each rank recorded, without any judgement of it.

Tensors are torch's. This module only carries them, so it imports torch for annotations alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.core.outcome import Outcome

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
"""Named tensors: the name of a parameter or buffer in ``job.model()`` to its value, on the cpu.

As a rank records them, sharded weights and gradients are a ``Shard`` each, and large ones a ``Sketch``. Reading the
trace of a launch joins the shards, and the judge replaces sketches by tensors before any check runs.
"""


SKETCH_ABOVE = 2**16
"""Tensors of weights and gradients with more entries than this are sketched, unless a launch says otherwise."""


@dataclass(frozen=True, eq=False)
class Sketch:
    """A linear sketch of one tensor: the sketch of a difference is the difference of the sketches.

    ``values`` are a seeded random projection, float64, on the cpu, as long on average as the tensor is: one row, and
    for a float64 tensor two that are meant to be added up, of the leading and of the trailing bits. ``norm`` is the
    tensor's 2-norm, not finite where an entry is not. ``fingerprint`` is a hash of the bits: tensors of one shape and
    dtype that are equal have the same one, others another. ``dtype`` is torch's name, ``float32``.
    """

    values: Tensor
    norm: float
    fingerprint: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def numbers(self) -> int:
        """How many numbers the projection has."""
        return self.values.shape[1]

    @property
    def identity(self) -> tuple[int, tuple[int, ...], str]:
        """What two sketches have in common exactly where their tensors are equal."""
        return self.fingerprint, self.shape, self.dtype


@dataclass(frozen=True, eq=False)
class Shard:
    """A block of a tensor of ``shape``, whose first entry has the place ``begin`` in it.

    ``values`` lie on the cpu, and may have no entries. ``ranks`` are those whose blocks make up the tensor, this rank's
    among them; with several copies of it they are one copy's. Where what a rank holds is no block (its part of a sum
    over ranks, say) there are none.
    """

    values: Tensor
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """One pass of one process: what each of its devices saw, and what the loss saw.

    ``forwards``: per forward call of the model, in order, the sample ids of its batch; one call a device.
    ``loss``: the sample ids that ``job.loss`` was given, or None if the subject has a loss of its own.
    ``drawn``: what the model's layers drew at random, by name, a row for each sample of ``forwards``; under the name
    and ``again`` what they drew when a backward computed an activation once more, where that is something else.
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
    """One optimizer step on one rank, or one that the GradScaler decided to skip.

    ``before`` and ``after`` are the weights around it, ``gradients`` what the optimizer was handed: unscaled,
    averaged, clipped, whatever the subject did to it. A parameter without a gradient is absent from it.
    ``learning_rates`` has one entry a parameter group. ``scale`` is the loss scale, None without a scaler.
    ``buffers`` are the model's where the step's first forward began: what a trainer that shares them had shared.

    Several optimizers, each with its own part of the model, make one step. Where they take ``turns``, each with a pass
    of its own over the same samples, they are here with the names of their parameters, in order: a later one's
    gradients are those at the weights that the earlier ones left. Empty where one pass is enough for all of them.
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


@dataclass(frozen=True)
class Evaluation:
    """Forwards without gradients, with no training between them: an evaluation, or a rank's share of one.

    It happened when ``step`` optimizer steps were done, and ``micro_batches`` of the next one. ``training`` says
    whether the model was in training mode in any of them.
    """

    step: int
    micro_batches: int
    samples: tuple[int, ...]
    training: bool


@dataclass(frozen=True)
class Logged:
    """A metric as reported when ``step`` optimizer steps were done, and ``micro_batches`` of the next one."""

    step: int
    name: str
    value: float
    micro_batches: int = 0


@dataclass(frozen=True)
class RankTrace:
    """What one rank emitted. ``world_size`` is what torch.distributed said, 1 where there was no group.

    ``error`` is what ``train`` raised, and ``failed_at`` when (seconds since the epoch); ``stack`` has the calls in
    which it was raised, a line each, the innermost first.
    ``torch`` is the version of torch that it ran with, "" where the evidence is older than this field.
    ``final`` and ``final_buffers`` are the model's when ``train`` was done; ``final`` is None where there was none.
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

    @property
    def tensor_sets(self) -> Iterator[Tensors]:
        """Every set of weights and of gradients, as it was recorded: whole, in shards, or as sketches."""
        for step in self.steps:
            yield from (step.before, step.gradients, step.after)
        if self.final is not None:
            yield self.final


@dataclass(frozen=True)
class Exit:
    """What became of a rank that left no evidence, in a sentence: crashed, timed out, or unable to write it (errored).

    Also where a rank hung that had left evidence: it was taken before, or while, it hung.

    ``step`` is how many optimizer steps it had done. ``waits_in`` names the collective in which it waited for others,
    None where that was none that is known. ``stack`` has its calls, a line each, the innermost first; ``said`` is the
    end of what it printed.
    """

    outcome: Outcome
    message: str
    step: int | None = None
    waits_in: str | None = None
    stack: str = ""
    said: str = ""


@dataclass(frozen=True)
class Trace:
    """The evidence of a whole launch, ordered by rank; ``exits`` has the ranks that left none.

    ``hung`` has ranks whose evidence is there, but which had to be ended: they hung after the last thing in it.

    Where the workload asks for an interruption two more launches belong to it: ``saved`` stopped in the middle and
    left a checkpoint, and ``resumed`` went on from that.
    """

    ranks: tuple[RankTrace, ...]
    exits: dict[int, Exit] = field(default_factory=dict)
    seconds: float | None = None
    saved: Trace | None = None
    resumed: Trace | None = None
    hung: dict[int, Exit] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every rank left evidence, and none of them raised."""
        return not self.exits and not any(rank.error for rank in self.ranks)

    @property
    def is_sketched(self) -> bool:
        """Whether a tensor of it, or of the launches that stop and go on, was recorded as a sketch."""
        own = any(
            isinstance(value, Sketch) for rank in self.ranks for part in rank.tensor_sets for value in part.values()
        )
        return own or any(other is not None and other.is_sketched for other in (self.saved, self.resumed))
