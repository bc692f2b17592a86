"""Why a launch that saved or resumed has other weights, buffers or loss scale than were left when it stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbline.evidence.trace import Tensors
from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, holds
from plumbline.judge.interrupted_training import Interruption
from plumbline.judge.trace_analysis import same


@dataclass(frozen=True, eq=False)
class InterruptedCase(CountedCase):
    """An interrupted training beside the uninterrupted one, at the rank of the finding."""

    interruption: Interruption
    rank: int


class StopCase(InterruptedCase):
    """A launch that stopped at another step than it had to."""

    @property
    def count(self) -> int:
        """How many steps the launch took."""
        return len(self.interruption.saved.trace.ranks[self.rank].steps)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the launch used."""
        return sum(len(step.micro_batches) for step in self.interruption.saved.trace.ranks[self.rank].steps)

    @property
    def at_epoch_end(self) -> bool:
        """Whether the launch stopped at the end of an epoch."""
        return self.count > 0 and self.count % self.interruption.epoch_length == 0


class OrderCase(InterruptedCase):
    """Launches that had another order of samples from the beginning."""


@dataclass(frozen=True, eq=False)
class StateCase(InterruptedCase):
    """Tensors before the first resumed step (``found``) that are not those that the first rank left (``left``).

    ``start`` are those of the beginning.
    """

    found: Tensors
    left: Tensors
    start: Tensors

    @property
    def lost(self) -> list[str]:
        """The names of the tensors that are not those that were left."""
        return [name for name in self.left if not _equal(name, self.found, self.left)]


class ResumedWeightsCase(StateCase):
    """Weights that are not those that were left."""

    @classmethod
    def of(cls, interruption: Interruption, rank: int) -> ResumedWeightsCase:
        """Return the case of a rank."""
        found = interruption.resumed.trace.ranks[rank].steps[0].before
        return cls(interruption, rank, found, interruption.left(0)[0], interruption.whole.start)


class ResumedBuffersCase(StateCase):
    """Buffers that are not those that were left."""

    @classmethod
    def of(cls, interruption: Interruption, rank: int) -> ResumedBuffersCase:
        """Return the case of a rank."""
        found = interruption.resumed.trace.ranks[rank].steps[0].buffers
        start = interruption.whole.steps[0].ranks[0].buffers
        return cls(interruption, rank, found, interruption.origin(0).final_buffers, start)


@dataclass(frozen=True, eq=False)
class ScaleCase(InterruptedCase):
    """A loss scale that is not that of the uninterrupted training, at a resumed step."""

    step: int

    @property
    def found(self) -> float | None:
        """The loss scale of the resumed step, None without a GradScaler."""
        return self.interruption.resumed.steps[self.step - self.interruption.place].ranks[self.rank].scale

    @property
    def first(self) -> float | None:
        """The loss scale of the first step."""
        return self.interruption.whole.steps[0].ranks[self.rank].scale

    @property
    def last(self) -> float | None:
        """The loss scale of the last step before the interruption."""
        return self.interruption.origin(self.rank).steps[-1].scale


StopHypothesis = Hypothesis[StopCase, Match]
OrderHypothesis = Hypothesis[OrderCase, Match]
WeightsHypothesis = Hypothesis[ResumedWeightsCase, Match]
BuffersHypothesis = Hypothesis[ResumedBuffersCase, Match]
ScaleHypothesis = Hypothesis[ScaleCase, Match]


def _equal(name: str, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return name in left and name in right and left[name].equal(right[name])


def _never_stopped(case: StopCase) -> Iterator[Match]:
    if case.count == case.interruption.total:
        yield Match(figures={"count": case.count})


def _stopped_after_micro_batches(case: StopCase) -> Iterator[Match]:
    if case.micro_batches == case.interruption.workload.interrupt_after:
        yield Match(figures={"count": case.micro_batches})


def _stopped_elsewhere(case: StopCase) -> Iterator[Match]:
    yield Match(figures={"count": case.count})


STOP = (
    StopHypothesis("never-stopped", "checkpoint", _never_stopped,
        "it went on to the end, for {count} steps",
        "is job.stop_after_step used?", 190),
    StopHypothesis("stopped-elsewhere", "checkpoint", _stopped_after_micro_batches,
        "it stopped after {count} micro-batches",
        "job.stop_after_step counts optimizer steps", 180),
    StopHypothesis("stopped-elsewhere", "checkpoint", holds(lambda case: case.at_epoch_end),
        "it stopped at the end of an epoch",
        "checkpoints are due within epochs too", 170),
    StopHypothesis("stopped-elsewhere", "checkpoint", _stopped_elsewhere,
        "it stopped after {count} steps",
        "what does it count, and from where?", 160),
)  # fmt: skip


ORDER = (
    OrderHypothesis("order-depends-on-the-devices", "data", holds(lambda case: case.interruption.workload.elastic),
        "the order of samples depends on the number of devices",
        "derive it from the seed and the epoch alone", 190),
    OrderHypothesis("order-of-each-launch", "data", holds(lambda case: not case.interruption.workload.elastic),
        "every launch has an order of samples of its own",
        "is the sampler seeded with job.seed and the epoch?", 180),
)  # fmt: skip


def _on_some_ranks(case: ResumedWeightsCase) -> Iterator[Match]:
    traces = {trace.rank: trace.steps[0].before for trace in case.interruption.resumed.trace.ranks if trace.steps}
    right = [rank for rank, begun in traces.items() if any(same(begun, own) for own in case.interruption.left(rank))]
    if 0 < len(right) < len(traces):
        wrong = next(rank for rank in range(len(traces)) if rank not in right)
        which = f"rank{'s' if len(right) > 1 else ''} {', '.join(map(str, right))}"
        yield Match(rank=wrong, figures={"which": which})


def _weights_of_another_step(case: ResumedWeightsCase) -> Iterator[Match]:
    """Weights before a step of the launch that saved; those before its first step are the job's own."""
    for step, own in enumerate(case.interruption.origin(0).steps):
        if step and same(own.before, case.found):
            ago = case.interruption.place - step
            yield Match(figures={"ago": f"{ago} step{'s' if ago > 1 else ''}"})


def _buffers_of_another_step(case: ResumedBuffersCase) -> Iterator[Match]:
    for step, own in enumerate(case.interruption.origin(0).steps):
        if step and same(own.buffers, case.found):
            yield Match(figures={"step": step})


def _rounded(case: StateCase) -> Iterator[Match]:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rounded = {name: _through(value, dtype) for name, value in case.left.items()}
        if same(case.found, rounded):
            yield Match(figures={"dtype": str(dtype).removeprefix("torch.")})


def _through(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).to(value.dtype) if value.is_floating_point() else value


def _partly(case: StateCase) -> Iterator[Match]:
    """Some tensors are those that were left, and the others those of the beginning."""
    lost, left = case.lost, case.left
    if len(lost) < len(left) and all(_equal(name, case.found, case.start) for name in lost):
        names = ", ".join(lost[:3]) + (", …" if len(lost) > 3 else "")
        yield Match(figures={"count": len(lost), "all": len(left), "names": names})


def _altered(case: StateCase) -> Iterator[Match]:
    yield Match(figures={"count": len(case.lost), "all": len(case.left)})


WEIGHTS = (
    WeightsHypothesis("loaded-on-some-ranks", "checkpoint", _on_some_ranks,
        "only {which} loaded what was saved",
        "load it on every rank, or broadcast it", 190),
    WeightsHypothesis("weights-of-another-step", "checkpoint", _weights_of_another_step,
        "they are those of {ago} before the interruption",
        "save after the optimizer's step", 180),
    WeightsHypothesis("weights-not-loaded", "checkpoint", holds(lambda case: same(case.found, case.start)),
        "they are those of job.model()",
        "is the model's state loaded?", 170),
    WeightsHypothesis("rounded-when-saved", "checkpoint", _rounded,
        "they are those that were left, rounded to {dtype}",
        "save tensors in the type in which they are trained", 160),
    WeightsHypothesis("weights-partly-loaded", "checkpoint", _partly,
        "{count} of {all} tensors ({names}) are those of the beginning, the others as they were left",
        "is the model's whole state saved and loaded?", 150),
    WeightsHypothesis("weights-not-restored", "checkpoint", _altered,
        "{count} of {all} tensors are not as they were left",
        "what was saved, and what is changed when it is loaded?", 140),
)  # fmt: skip

BUFFERS = (
    BuffersHypothesis("buffers-not-restored", "checkpoint", holds(lambda case: same(case.found, case.start)),
        "they are those of the beginning",
        "is the model's whole state_dict saved and loaded, or only its parameters?", 190),
    BuffersHypothesis("buffers-of-another-step", "checkpoint", _buffers_of_another_step,
        "they are those of step {step}",
        "save buffers when the weights are saved", 180),
    BuffersHypothesis("rounded-when-saved", "checkpoint", _rounded,
        "they are those that were left, rounded to {dtype}",
        "save tensors in the type in which they are trained", 170),
    BuffersHypothesis("buffers-partly-restored", "checkpoint", _partly,
        "{count} of {all} buffers ({names}) are those of the beginning, the others as they were left",
        "is the model's whole state saved and loaded?", 160),
    BuffersHypothesis("buffers-not-restored", "checkpoint", _altered,
        "{count} of {all} buffers are not as they were left",
        "are buffers saved together with the weights?", 150),
)  # fmt: skip


SCALE = (
    ScaleHypothesis("scaler-gone", "checkpoint", holds(lambda case: case.found is None),
        "the loss is not scaled after resuming",
        "is a GradScaler created when training is resumed?", 190),
    ScaleHypothesis("scale-not-restored", "checkpoint", holds(lambda case: case.found == case.first),
        "it is the scale of the first step",
        "is the GradScaler's state_dict saved and loaded?", 180),
    ScaleHypothesis("scale-of-the-step-before", "checkpoint", holds(lambda case: case.found == case.last),
        "it is the scale of the last step before the interruption",
        "save the GradScaler after its update", 170),
    ScaleHypothesis("scale-not-restored", "checkpoint", holds(lambda case: True),
        "it is neither the first scale nor that of the last step before the interruption",
        "is the GradScaler's whole state saved and loaded?", 160),
)  # fmt: skip
