"""Why a resumed launch has other weights, buffers or loss scale than the launch that saved them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbline.core.numbers import counted
from plumbline.evidence.trace import Tensors, same
from plumbline.judge.causes.stage_pattern import ranks_in_words
from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, holds, register
from plumbline.judge.interrupted_training import Interruption


@dataclass(frozen=True, eq=False)
class InterruptedCase(CountedCase):
    """An interrupted training and the uninterrupted one, at the rank of the finding."""

    interruption: Interruption
    rank: int


class StopCase(InterruptedCase):
    """A launch that stopped at the wrong step."""

    @property
    def count(self) -> int:
        return len(self.interruption.saved.trace.ranks[self.rank].steps)

    @property
    def micro_batches(self) -> int:
        return sum(len(step.micro_batches) for step in self.interruption.saved.trace.ranks[self.rank].steps)

    @property
    def at_epoch_end(self) -> bool:
        return self.count > 0 and self.count % self.interruption.epoch_length == 0


class OrderCase(InterruptedCase):
    """Launches whose order of samples differs from the uninterrupted training's from the beginning."""


@dataclass(frozen=True, eq=False)
class StateCase(InterruptedCase):
    """Tensors before the first resumed step (``found``) that differ from those that the first rank left (``left``).

    ``start`` has the initial values.
    """

    found: Tensors
    left: Tensors
    start: Tensors

    @property
    def lost(self) -> list[str]:
        return [name for name in self.left if not _equal(name, self.found, self.left)]


class ResumedWeightsCase(StateCase):
    """Weights that differ from the saved ones."""

    @classmethod
    def of(cls, interruption: Interruption, rank: int) -> ResumedWeightsCase:
        found = interruption.resumed.trace.ranks[rank].steps[0].before
        return cls(interruption, rank, found, interruption.left(0)[0], interruption.whole.start)


class ResumedBuffersCase(StateCase):
    """Buffers that differ from the saved ones."""

    @classmethod
    def of(cls, interruption: Interruption, rank: int) -> ResumedBuffersCase:
        found = interruption.resumed.trace.ranks[rank].steps[0].buffers
        start = interruption.whole.steps[0].ranks[0].buffers
        return cls(interruption, rank, found, interruption.origin(0).final_buffers, start)


@dataclass(frozen=True, eq=False)
class ScaleCase(InterruptedCase):
    """A loss scale that differs from the uninterrupted training's at a resumed step."""

    step: int

    @property
    def found(self) -> float | None:
        """The loss scale of the resumed step, None without a GradScaler."""
        return self.interruption.resumed.steps[self.step - self.interruption.steps_done].ranks[self.rank].scale

    @property
    def first(self) -> float | None:
        return self.interruption.whole.steps[0].ranks[self.rank].scale

    @property
    def last(self) -> float | None:
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


register(
    StopCase,
    StopHypothesis("never-stopped", "checkpoint", _never_stopped,
        "it ran to the end, for {count} steps",
        "stop after job.stop_after_step optimizer steps", 190),
    StopHypothesis("stopped-elsewhere", "checkpoint", _stopped_after_micro_batches,
        "it stopped after {count} micro-batches",
        "job.stop_after_step counts optimizer steps", 180),
    StopHypothesis("stopped-elsewhere", "checkpoint", holds(lambda case: case.at_epoch_end),
        "it stopped at the end of an epoch",
        "stop and save within an epoch too", 170),
    StopHypothesis("stopped-elsewhere", "checkpoint", lambda case: [Match(figures={"count": case.count})],
        "it stopped after {count} steps",
        "check what the trainer counts, and from where", 160),
)  # fmt: skip


register(
    OrderCase,
    OrderHypothesis("order-depends-on-the-devices", "data", holds(lambda case: case.interruption.workload.elastic),
        "the order of samples depends on the number of devices",
        "derive it from the seed and the epoch alone", 190),
    OrderHypothesis("order-of-each-launch", "data", holds(lambda case: not case.interruption.workload.elastic),
        "every launch uses a different order of samples",
        "seed the sampler with job.seed and the epoch", 180),
)  # fmt: skip


def _on_some_ranks(case: ResumedWeightsCase) -> Iterator[Match]:
    traces = {trace.rank: trace.steps[0].before for trace in case.interruption.resumed.trace.ranks if trace.steps}
    right = [rank for rank, begun in traces.items() if any(same(begun, own) for own in case.interruption.left(rank))]
    if 0 < len(right) < len(traces):
        wrong = next(rank for rank in range(len(traces)) if rank not in right)
        yield Match(rank=wrong, figures={"which": ranks_in_words(right)})


def _weights_of_another_step(case: ResumedWeightsCase) -> Iterator[Match]:
    for step, own in enumerate(case.interruption.origin(0).steps):
        if step and same(own.before, case.found):
            ago = case.interruption.steps_done - step
            yield Match(figures={"ago": counted(ago, "step")})


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
    lost, left = case.lost, case.left
    if len(lost) < len(left) and all(_equal(name, case.found, case.start) for name in lost):
        names = ", ".join(lost[:3]) + (", …" if len(lost) > 3 else "")
        yield Match(figures={"count": len(lost), "all": len(left), "names": names})


def _altered(case: StateCase) -> Iterator[Match]:
    yield Match(figures={"count": len(case.lost), "all": len(case.left)})


register(
    ResumedWeightsCase,
    WeightsHypothesis("loaded-on-some-ranks", "checkpoint", _on_some_ranks,
        "only {which} loaded what was saved",
        "load it on every rank, or broadcast it", 190),
    WeightsHypothesis("weights-of-another-step", "checkpoint", _weights_of_another_step,
        "they are the weights of {ago} before the interruption",
        "save after the optimizer's step", 180),
    WeightsHypothesis("weights-not-loaded", "checkpoint", holds(lambda case: same(case.found, case.start)),
        "they are the initial weights of job.model()",
        "load the model's state_dict", 170),
    WeightsHypothesis("rounded-when-saved", "checkpoint", _rounded,
        "they are the saved values rounded to {dtype}",
        "save tensors in the dtype in which they are trained", 160),
    WeightsHypothesis("weights-partly-loaded", "checkpoint", _partly,
        "{count} of {all} tensors ({names}) have their initial values, and the others were restored",
        "save and load the model's whole state_dict", 150),
    WeightsHypothesis("weights-not-restored", "checkpoint", _altered,
        "{count} of {all} tensors differ from the saved ones",
        "check what is saved, and what changes when it is loaded", 140),
)  # fmt: skip

register(
    ResumedBuffersCase,
    BuffersHypothesis("buffers-not-restored", "checkpoint", holds(lambda case: same(case.found, case.start)),
        "they have their initial values",
        "save and load the model's whole state_dict, not only its parameters", 190),
    BuffersHypothesis("buffers-of-another-step", "checkpoint", _buffers_of_another_step,
        "they are the buffers of step {step}",
        "save buffers when the weights are saved", 180),
    BuffersHypothesis("rounded-when-saved", "checkpoint", _rounded,
        "they are the saved values rounded to {dtype}",
        "save tensors in the dtype in which they are trained", 170),
    BuffersHypothesis("buffers-partly-restored", "checkpoint", _partly,
        "{count} of {all} buffers ({names}) have their initial values, and the others were restored",
        "save and load the model's whole state_dict", 160),
    BuffersHypothesis("buffers-not-restored", "checkpoint", _altered,
        "{count} of {all} buffers differ from the saved ones",
        "save buffers together with the weights", 150),
)  # fmt: skip


register(
    ScaleCase,
    ScaleHypothesis("scaler-gone", "checkpoint", holds(lambda case: case.found is None),
        "the loss is not scaled after resuming",
        "create a GradScaler when training resumes", 190),
    ScaleHypothesis("scale-not-restored", "checkpoint", holds(lambda case: case.found == case.first),
        "it is the scale of the first step",
        "save and load the GradScaler's state_dict", 180),
    ScaleHypothesis("scale-of-the-step-before", "checkpoint", holds(lambda case: case.found == case.last),
        "it is the scale of the last step before the interruption",
        "save the GradScaler after its update", 170),
    ScaleHypothesis("scale-not-restored", "checkpoint", holds(lambda case: True),
        "it is neither the first scale nor that of the last step before the interruption",
        "save and load the GradScaler's whole state_dict", 160),
)  # fmt: skip
