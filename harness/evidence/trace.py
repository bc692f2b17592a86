"""The evidence of one launch: what each rank saw, and nothing of what anybody thinks of it.

Tensors are torch's. They are only carried here, so this file needs torch for its annotations alone.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from harness.core.outcome import Outcome
from harness.evidence.shard import Shard
from harness.evidence.sketch import Sketch

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
"""Named tensors: a parameter's or a buffer's name in ``job.model()`` to its value, on the cpu.

As a rank recorded them, weights and gradients that ranks share out are here as a ``Shard``, and large ones as a
``Sketch``. Shards are put together when the traces of a launch are read; the judge follows the training along its
sketches before it asks anything, and sees tensors only.
"""


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


def flatten(trace: RankTrace) -> tuple[dict[str, Any], Tensors]:
    """Split a rank's trace into plain JSON values and a flat dict of tensors, the form in which it travels.

    Weights that did not change between two steps travel once.
    """
    tensors: Tensors = {}
    steps: list[dict[str, Any]] = []
    previous: Tensors | None = None
    for number, step in enumerate(trace.steps):
        continues = step.before is previous
        for part in ("gradients", "after", "buffers") + (() if continues else ("before",)):
            tensors.update({f"{number}/{part}/{name}": value for name, value in getattr(step, part).items()})
        for place, micro in enumerate(step.micro_batches):
            tensors.update({f"{number}/drawn {place}/{name}": value for name, value in micro.drawn.items()})
        steps.append(
            {
                "micro_batches": [[micro.forwards, micro.loss] for micro in step.micro_batches],
                "learning_rates": step.learning_rates,
                "skipped": step.skipped,
                "scale": step.scale,
                "continues": continues,
                "turns": step.turns,
            }
        )
        previous = step.after
    # As with a step's: the end usually is what the last step left.
    ended = previous is not None and trace.final is previous
    if trace.final is not None and not ended:
        tensors.update({f"{len(steps)}/final/{name}": value for name, value in trace.final.items()})
    tensors.update({f"{len(steps)}/final buffers/{name}": value for name, value in trace.final_buffers.items()})
    sketches: dict[str, Any] = {name: value for name, value in tensors.items() if isinstance(value, Sketch)}
    shards: dict[str, Any] = {name: value for name, value in tensors.items() if isinstance(value, Shard)}
    return {
        "final": None if trace.final is None else "last" if ended else "own",
        "rank": trace.rank,
        "world_size": trace.world_size,
        "error": trace.error,
        "failed_at": trace.failed_at,
        "stack": trace.stack,
        "torch": trace.torch,
        "steps": steps,
        "evaluations": [astuple(evaluation) for evaluation in trace.evaluations],
        "logged": [astuple(logged) for logged in trace.logged],
        "sketches": {name: [s.norm, s.fingerprint, s.shape, s.dtype] for name, s in sketches.items()},
        "shards": {name: [s.begin, s.shape, s.ranks] for name, s in shards.items()},
    }, {**tensors, **{name: part.values for name, part in {**sketches, **shards}.items()}}


def unflatten(values: dict[str, Any], tensors: Tensors) -> RankTrace:
    """Undo :func:`flatten`.

    Raises:
        LookupError, TypeError, ValueError: the values are not those of a trace.
    """
    recorded = values["steps"]
    parts: dict[tuple[int, str], Tensors] = {}
    sketches: dict[str, Any] = {
        name: Sketch(tensors[name], norm, fingerprint, tuple(shape), dtype)
        for name, (norm, fingerprint, shape, dtype) in dict(values.get("sketches", {})).items()
    }
    shards: dict[str, Any] = {
        name: Shard(tensors[name], *(tuple(map(int, numbers)) for numbers in (begin, shape, ranks)))
        for name, (begin, shape, ranks) in dict(values.get("shards", {})).items()
    }
    for key, value in {**tensors, **sketches, **shards}.items():
        place, part, name = key.split("/", 2)
        parts.setdefault((int(place), part), {})[name] = value
    steps: list[Step] = []
    for number, step in enumerate(recorded):
        steps.append(
            Step(
                micro_batches=tuple(
                    MicroBatch(
                        tuple(tuple(share) for share in forwards),
                        None if loss is None else tuple(loss),
                        parts.get((number, f"drawn {place}"), {}),
                    )
                    for place, (forwards, loss) in enumerate(step["micro_batches"])
                ),
                before=steps[-1].after if step["continues"] else parts.get((number, "before"), {}),
                gradients=parts.get((number, "gradients"), {}),
                after=parts.get((number, "after"), {}),
                learning_rates=tuple(step["learning_rates"]),
                skipped=step["skipped"],
                scale=step["scale"],
                buffers=parts.get((number, "buffers"), {}),
                turns=tuple(tuple(names) for names in step.get("turns", ())),
            )
        )
    finals = {None: None, "own": parts.get((len(steps), "final"), {}), "last": steps[-1].after if steps else None}
    return RankTrace(
        rank=values["rank"],
        world_size=values["world_size"],
        steps=tuple(steps),
        error=values["error"],
        failed_at=values["failed_at"],
        stack=values.get("stack", ""),
        torch=values.get("torch", ""),
        final=finals[values["final"]],
        final_buffers=parts.get((len(steps), "final buffers"), {}),
        evaluations=tuple(
            Evaluation(step, micro_batches, tuple(samples), training)
            for step, micro_batches, samples, training in values["evaluations"]
        ),
        logged=tuple(Logged(*logged) for logged in values["logged"]),
    )
