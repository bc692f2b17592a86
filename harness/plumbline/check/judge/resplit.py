"""Measures how the first step's gradient changes if its samples go to other ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbline.check.evidence.options import Deal, RecordingOptions
from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.noted import headline_note, not_judged
from plumbline.check.judge.rank_weights import rank_layout
from plumbline.check.judge.step_objective import received_by
from plumbline.core.finding import Finding
from plumbline.judge.findings import passed
from plumbline.report.text import in_two_digits

CHECK = "resplit"

Rerun = Callable[[RecordingOptions, Deal], Sequence[RecordedTraining]]
"""Runs the training again with the given distribution of samples, and returns what was recorded."""

UNSTEADY = 0.02
"""Largest change of a gradient, relative to its norm, although the split is the same. Chosen: above the effect of
rounding to bfloat16, and below that of different random numbers. If it changes more, nothing is said about the
split."""

MOVED = 10.0
"""Smallest ratio of the change by a new split to the change by a new order of samples that is reported. Chosen: both
are norms of one rounding error each. It never causes a failure."""

LEAST = 1e-5
"""The smallest relative change that is reported: some hundred roundings of float32."""

_WITHOUT_DROPOUT = RecordingOptions(steps=1, stop=True, splits=True, without_dropout=True)


class _UnknownError(Exception):
    """The samples of the step cannot be redistributed; the message says why."""


@dataclass(frozen=True)
class Split:
    """The samples of each micro-batch of each rank in the first step, and the iterator that yields them."""

    batches: Mapping[int, list[list[int]]]
    iterators: Mapping[int, int]

    @property
    def samples(self) -> list[int]:
        return [one for own in self.batches.values() for batch in own for one in batch]

    def as_it_was(self) -> Deal:
        """Return the micro-batches of the script."""
        return self._deal(self.batches)

    def ordered_otherwise(self) -> Deal:
        """Return the same micro-batches in reverse order, each with its samples in reverse order."""
        return self._deal({rank: [batch[::-1] for batch in own][::-1] for rank, own in self.batches.items()})

    def dealt_otherwise(self) -> Deal:
        """Return micro-batches of the same sizes, each with samples from as many of the others as possible."""
        places = [(rank, index) for rank, own in self.batches.items() for index in range(len(own))]
        room = {place: len(self.batches[place[0]][place[1]]) for place in places}
        made: dict[tuple[int, int], list[int]] = {place: [] for place in places}
        turn = 0
        for sample in self.samples:
            while len(made[places[turn % len(places)]]) >= room[places[turn % len(places)]]:
                turn += 1
            made[places[turn % len(places)]].append(sample)
            turn += 1
        return self._deal(
            {rank: [made[rank, index] for index in range(len(own))] for rank, own in self.batches.items()}
        )

    def _deal(self, batches: Mapping[int, list[list[int]]]) -> Deal:
        return {rank: (self.iterators[rank], own) for rank, own in batches.items()}


def judge_resplit(trainings: Sequence[RecordedTraining], rerun: Rerun) -> Finding:
    """Train the first step again, once with its samples reordered and once with its samples redistributed.

    ``trainings`` are those of the first run. Dropout is switched off, because its masks depend on positions in a batch.
    If the script uses dropout, the step is also trained again with the original split.
    """
    try:
        first = _sole(trainings)
        split = _split(first)
        ordered = _sole(rerun(_WITHOUT_DROPOUT, split.ordered_otherwise()))
        dealt = _sole(rerun(_WITHOUT_DROPOUT, split.dealt_otherwise()))
        if any(rank.noted("splits").get("dropouts") for rank in dealt.ranks):
            first = _sole(rerun(_WITHOUT_DROPOUT, split.as_it_was()))
        if _split(dealt).batches != {rank: own for rank, (_, own) in split.dealt_otherwise().items()}:
            raise _UnknownError("the loader did not take the samples that it was given")
        return _compared(_gradient(first), _gradient(ordered), _gradient(dealt), len(split.samples))
    except _UnknownError as error:
        return not_judged(CHECK, str(error))


def _compared(first: Tensor, ordered: Tensor, dealt: Tensor, samples: int) -> Finding:
    if not first.shape == ordered.shape == dealt.shape or not bool(first.any()):
        raise _UnknownError("the gradient is zero, or the script trained other parameters when it ran again")
    order, move = (float((one - first).norm() / first.norm()) for one in (ordered, dealt))
    by_order = f"about {in_two_digits(order)}" if order >= LEAST else f"{100 * order:.1g} %"
    if not order <= UNSTEADY:
        raise _UnknownError(
            f"the gradient also changes by {by_order} of its norm if samples and micro-batches are only reordered. "
            "Set a seed, and make random augmentations depend on the sample, not on its position"
        )
    if move <= max(LEAST, MOVED * order):
        return passed(
            CHECK,
            f"the split has no visible effect: the gradient changes by {in_two_digits(move)} of its norm if the "
            f"{samples} samples of the first step go to other ranks and micro-batches, and by {by_order} if they are "
            "only reordered",
        )
    return headline_note(
        CHECK,
        f"The gradient changes by about {in_two_digits(move)} of its norm if the {samples} samples of the first step "
        f"go to other ranks and micro-batches, and by {by_order} if they are only reordered. A loss that is divided by "
        "the count of its own micro-batch or rank depends on the split; so do layers such as BatchNorm, and outputs "
        "that depend on padding. Declare the objective with --objective to have it judged.",
    )


def _gradient(training: RecordedTraining) -> Tensor:
    steps = [[step for step in rank.steps if step.number == 0] for rank in training.ranks]
    if not all(steps) or len(set(map(len, steps))) > 1:
        raise _UnknownError("the first step of all ranks was not recorded")
    found = torch.cat([received_by(together) for together in zip(*steps, strict=True)])
    return torch.where(found.isnan(), 0.0, found)


def _sole(trainings: Sequence[RecordedTraining]) -> RecordedTraining:
    if not trainings:
        raise _UnknownError("the command recorded no step when it ran again")
    if len(trainings) != 1:
        raise _UnknownError(f"{len(trainings)} trainings were recorded, but only a single one can be resplit")
    return trainings[0]


def _split(training: RecordedTraining) -> Split:
    layout = rank_layout(training)
    if training.world_size > 1 and not layout.is_data_parallel:
        raise _UnknownError(f"samples can be moved to other ranks under data parallelism only; {layout.reason}")
    batches, iterators = {}, {}
    for rank in training.ranks:
        noted = rank.noted("splits")
        if noted.get("iterator") is None:
            raise _UnknownError("the first batch does not come from a torch DataLoader")
        if noted["batches"] is None:
            raise _UnknownError("the loader has no sample indices; use a map-style dataset, not an IterableDataset")
        passes = rank.steps[0].passes
        own = noted["batches"][: len(passes)]
        rows = [(one.noted("batches").get("forwards") or [{}])[0].get("rows") for one in passes]
        if len(own) < len(passes) or any(
            not n or not batch or n % len(batch) for n, batch in zip(rows, own, strict=True)
        ):
            raise _UnknownError("each backward pass must be over one batch of the loader, with a row for each sample")
        batches[rank.rank], iterators[rank.rank] = own, noted["iterator"]
    if sum(map(len, batches.values())) < 2:
        raise _UnknownError("the step has one micro-batch on one rank, so there is nothing to split")
    return Split(batches, iterators)
