"""The measurements of one rank in a timed launch, as they are sent to the parent."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
WEIGHTS: Final = "weights"
"""What a chunk computes: outputs, gradients, or only the deferred gradients of weights."""

ChunkKind = Literal["forward", "backward", "weights"]


@dataclass(frozen=True)
class Chunk:
    """What one stage of a pipeline computes on one micro-batch.

    ``stage`` counts the stages of this rank, ``micro_batch`` those of a step. Times are as in ``Round``.
    """

    kind: ChunkKind
    stage: int
    micro_batch: int
    begun: float
    ended: float


@dataclass(frozen=True)
class Round:
    """Some steps between two boundaries at which all ranks wait for each other, their devices idle.

    Times are seconds of the machine's monotonic clock, which all ranks share. ``begun``: the rank was released or, for
    the warm-up, its first forward began. For each step, ``forwards`` has the beginning of its first forward, and
    ``ended`` the end of the optimizer step, at the last one with an idle device. ``samples`` are the ids that went
    through the model's forward with gradients enabled.
    """

    begun: float
    forwards: tuple[float, ...]
    ended: tuple[float, ...]
    samples: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """The rank's wall time for the round."""
        return self.ended[-1] - self.begun

    @property
    def steps(self) -> int:
        return len(self.ended)

    @property
    def waited(self) -> float:
        """Seconds between the end of a step, or the beginning of the round, and the next forward, over all steps."""
        return sum(forward - end for end, forward in zip((self.begun, *self.ended), self.forwards, strict=False))


@dataclass(frozen=True)
class RankTiming:
    """What one rank sends: the timed rounds, and what was measured after them.

    ``memory`` has bytes and counts by metric. ``tensors`` has bytes by metric, ``communication`` a share of the time,
    ``shares`` the shares of a step's parts by name, and ``flops`` the floating-point operations of a step. These are
    None if they were not measured, ``communication`` also if there was no collective, and ``flops`` if it is unknown.
    ``pipeline`` has the chunks of some steps of the warm-up, in order; it is empty without a pipeline.
    ``devices`` are the UUIDs of the rank's GPUs, if torch reports them.
    ``problems`` say which files of a profiled launch could not be written.
    """

    rank: int
    warmup: Round
    rounds: tuple[Round, ...]
    memory: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, int] | None = None
    communication: float | None = None
    shares: dict[str, float] | None = None
    flops: int | None = None
    pipeline: tuple[tuple[Chunk, ...], ...] = ()
    devices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankTiming:
        """Undo :meth:`to_json`."""
        return cls(
            **{
                **values,
                "warmup": _round(values["warmup"]),
                "rounds": tuple(map(_round, values["rounds"])),
                "pipeline": tuple(tuple(Chunk(**chunk) for chunk in step) for step in values["pipeline"]),
                **{name: tuple(values[name]) for name in ("devices", "problems")},
            }
        )


def _round(values: dict[str, Any]) -> Round:
    return Round(values["begun"], *(tuple(values[name]) for name in ("forwards", "ended", "samples")))
