"""Compares each optimizer's step with its replay in float64: it is taken once, and changes only this rank's weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch

from plumbline.check.evidence.training import RecordedStep, RecordedTraining
from plumbline.check.judge.noted import (
    FIRST_SEEN,
    HeadlineNote,
    ObserverFacts,
    headline_note,
    not_judged,
    noted,
    side_by_side,
)
from plumbline.check.judge.optimizer_state import changed_state, judge_optimizer_state
from plumbline.check.judge.rank_weights import WEIGHTS
from plumbline.check.judge.replayed_updates import (
    OBSERVER,
    STILL,
    NearReplay,
    ReplayedUpdates,
    near_replays,
    replayed_updates,
)
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.judge.causes.update import KNOWN_TO, UpdateCase
from plumbline.judge.findings import compare_with_one, failed_with_hint, with_parameters
from plumbline.judge.hypothesis import Hypothesis, Match, explain, holds, register
from plumbline.judge.oracle.noise import largest, limit
from plumbline.report.text import listed


def judge_update(training: RecordedTraining) -> Iterator[Finding]:
    """Compare each step with its replay in float64, and say which steps could not be judged, and why."""
    if (sharing := _shared_memory(training)) is not None:
        yield sharing
        return
    for flaw in (_stepped_again, _stepped_by_two_optimizers):
        if (again := flaw(training)) is not None:
            yield again
    steps = replayed_updates(training)
    if steps.errors:
        yield _compared(steps)
    elif not steps.why:
        yield not_judged("update", "no optimizer step was replayed")
    for why, parameters in steps.why.items():
        yield not_judged("update", f"{why}: {listed(parameters)}" if parameters else why)
    yield from _changed_weights(training)
    yield from judge_optimizer_state(training) or _changed_states(training)


def _compared(steps: ReplayedUpdates) -> Finding:
    if not any(row[3] or row[4] for _, one in steps.errors for row in one.facts["parameters"]):
        return not_judged(
            "update", "the recorded steps should not change any weight: check whether the learning rate is 0"
        )
    errors = [deviation for deviation, _ in steps.errors]
    worst = largest(errors)
    expected = "those that the optimizer makes of the recorded gradients in float64"
    finding = compare_with_one("update", "weights after the step", expected, worst, limit())
    if finding.outcome is not Outcome.FAILED:
        return finding
    step = next(one for deviation, one in steps.errors if deviation is worst)
    others = [one for _, one in steps.errors if one.step.number == step.step.number and one.rank != step.rank]
    others = [one for one in others if one.step.optimizer == step.step.optimizer]
    mine = [deviation for deviation, one in steps.errors if one is step]
    return explain(with_parameters(finding, mine), ReplayedUpdateCase(step, others))


@dataclass(frozen=True, eq=False)
class ReplayedUpdateCase(UpdateCase):
    """A step that differs from its replay, and the same step of the other ranks."""

    one: ObserverFacts
    others: list[ObserverFacts]

    digits = 4  # the precision of projections

    @cached_property
    def rows(self) -> dict[int, list[float]]:
        """By parameter number: error, noise, norms of the right and the actual update, their scalar product, more."""
        return {int(number): row for number, *row in self.one.facts["parameters"]}

    @cached_property
    def near(self) -> dict[int, NearReplay]:
        """The replays in their own precision, by parameter number, for parameters that must be near to them."""
        return near_replays(self.one)

    def like(self, *names: str) -> list[int]:
        """Return the numbers of the parameters whose update matches one of these mistakes."""
        return [number for number, one in self.near.items() if one.mistake in names]

    @property
    def made(self) -> float:
        """The norm of the actual update."""
        return math.hypot(*(made for _, _, _, made, *_ in self.rows.values()))

    @property
    def due(self) -> float:
        """The norm of the right update."""
        return math.hypot(*(due for _, _, due, *_ in self.rows.values()))

    @property
    def is_still(self) -> bool:
        return self.made == 0

    @property
    def factor(self) -> float:
        products = (product for _, _, _, _, product, *_ in self.rows.values())
        return sum(products) / self.due**2 if self.due else math.nan

    @property
    def is_multiple(self) -> bool:
        rest = self.made**2 - self.factor**2 * self.due**2
        return rest <= (KNOWN_TO * self.made) ** 2

    @property
    def lower_precision(self) -> tuple[str, str] | None:
        precisions = dict.fromkeys(parameter.dtype for parameter in self.one.step.parameters)
        return ("bfloat16", listed(precisions)) if self.one.facts["rounded"] else None

    @property
    def due_to_move(self) -> Set[str | int]:
        return {number for number, (_, _, due, *_) in self.rows.items() if due}

    @property
    def moved(self) -> Sequence[Set[str | int]]:
        return [{int(row[0]) for row in one.facts["parameters"] if row[4]} for one in (self.one, *self.others)]

    def is_right(self, parameter: str | int) -> bool:
        error, _, due, *_ = self.rows[int(parameter)]
        return error <= KNOWN_TO * due


def _like(*names: str) -> Callable[[ReplayedUpdateCase], Iterator[Match]]:
    """Return a ``predict`` that matches if the update of a parameter matches one of these mistakes."""

    def matches(case: ReplayedUpdateCase) -> Iterator[Match]:
        if numbers := case.like(*names):
            yield Match(figures={"matrices": _matrices(case, numbers)})

    return matches


def _stepped_nowhere(case: ReplayedUpdateCase) -> Iterator[Match]:
    others = [near_replays(one) for one in case.others]
    nowhere = [
        number for number in case.like(*STILL) if all(number in one and one[number].mistake in STILL for one in others)
    ]
    if nowhere:
        yield Match(figures={"matrices": _matrices(case, nowhere)})


def _scaled(case: ReplayedUpdateCase) -> Iterator[Match]:
    for decays in (True, False):
        found = {number: one for number, one in case.near.items() if one.factor is not None and one.decays == decays}
        if found:
            part = "without weight decay, the update" if decays else "the update"
            factor = next(one.factor for one in found.values())
            yield Match(figures={"part": part, "matrices": _matrices(case, [*found]), "factor": factor})
            return


def _matrices(case: ReplayedUpdateCase, numbers: Sequence[int]) -> str:
    return listed([case.one.parameter(number) for number in numbers])


register(
    ReplayedUpdateCase,
    Hypothesis("update-not-finite", "amp", holds(lambda case: math.isfinite(case.due) > math.isfinite(case.made)),
        "weights are infinite or NaN after the step, although the right update is finite",
        "keep weights and state in float32: eps, or the square of a gradient, may round to 0 in a 16-bit state", 190),
    Hypothesis("stepped-shard-by-shard", "optimizer", _like("by-shard"),
        "each rank steps its shard of {matrices} as if it were the whole parameter",
        "gather the whole matrix before the optimizer combines its entries, for example with full_tensor(). One device "
        "computes another update, even if blocks are intended, as in MuonBP", 150),
    Hypothesis("summed-over-ranks", "averaging", _like("added"),
        "the step adds up the ranks' gradients of {matrices} and does not average them, and no loss is divided by the "
        "number of ranks",
        "divide the result of the all-reduce, or the loss, by the number of ranks", 151),
    Hypothesis("updates-summed", "averaging", _like("summed", "summed-but-decay"),
        "the updates of {matrices} from all ranks are added up",
        "gather the updates; add them up only if each rank computes a different part", 149),
    Hypothesis("state-begun-anew", "optimizer", _like("state-anew"),
        "the state of {matrices} is not used, as if the optimizer had just been created",
        "check that the rank that steps a parameter has its state", 148),
    Hypothesis("weight-decay-lost", "optimizer", _like("decay-lost"),
        "the weights of {matrices} do not decay, although weight_decay is not 0",
        "decay weights on the rank whose update is gathered", 147),
    Hypothesis("weight-decay-doubled", "optimizer", _like("decay-twice"),
        "the weights of {matrices} decay twice",
        "decay weights once: on the rank whose update is gathered, or on all ranks after that", 146),
    Hypothesis("not-stepped-on-any-rank", "optimizer", _stepped_nowhere,
        "no rank steps {matrices}",
        "check which rank steps which parameter: the last parameters may not be assigned to any rank", 165),
    Hypothesis("scaled-update", "optimizer", _scaled,
        "{part} of {matrices} is {factor} × the right one",
        "check for an average over ranks, and for a learning rate that is scaled by the shape of a shard", 145),
    Hypothesis("another-optimizer", "optimizer", holds(lambda case: True),
        "the update is not a multiple of the right one",
        "check whether other code, or another process, changes weights during the step", 105),
)  # fmt: skip


def _shared_memory(training: RecordedTraining) -> Finding | None:
    """Find ranks whose parameters share memory, so that each rank's update is applied to the weights of all.

    Processes that share weights without a process group, as in Hogwild!, do so on purpose.
    """
    if training.world_size == 1:
        return None
    for ranks in side_by_side(training, OBSERVER):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, one in ranks.items():
            if not one.step.skipped:
                for place in one.facts["shared"].values():
                    holders[place].append(rank)
        together = max(holders.values(), key=len, default=[])
        if len(together) > 1:
            first = ranks[together[0]]
            count = sum(len(sharing) > 1 for sharing in holders.values())
            return first.failed(
                "update",
                f"ranks {listed(together)} have {counted(count, 'parameter')} in the same memory, so every update is "
                "applied once per rank",
                "create the model on each rank: torch.multiprocessing.spawn shares a model that is passed to it",
                cause="applied-once-a-rank",
                family="averaging",
            )
    return None


def _stepped_again(training: RecordedTraining) -> Finding | None:
    for rank in training.ranks:
        last: dict[int, torch.Tensor] = {}
        # Gradients that do not come from backward passes may rightly be the same twice.
        followed = {step.optimizer for step in rank.steps if step.passes}
        for step in rank.steps:
            received = step.received.nan_to_num()
            before = last.get(step.optimizer)
            if not step.skipped:
                last[step.optimizer] = received
            quiet = step.optimizer in followed and not (step.skipped or step.passes or step.other_passes)
            if quiet and before is not None and bool(received.any()) and torch.equal(received, before):
                return failed_with_hint(
                    "steps",
                    "the optimizer stepped again with the gradient of its last step, without a backward pass in "
                    f"between{FIRST_SEEN}",
                    "find what calls it twice: optimizer.step() beside scaler.step(optimizer), or join() with "
                    "ZeroRedundancyOptimizer on a rank without inputs",
                    cause="stepped-without-a-batch",
                    family="optimizer",
                    step=step.number,
                    rank=rank.rank,
                )
    return None


def _stepped_by_two_optimizers(training: RecordedTraining) -> Finding | None:
    """Find parameters that two optimizers update with the same gradient of the same backward pass.

    Several parameters can have the same name. They are one parameter if the second optimizer finds the values that the
    first one left.
    """
    for rank in training.ranks:
        last: dict[str, tuple[RecordedStep, torch.Tensor, object]] = {}
        for step in rank.steps:
            moved = _moved(step)
            digests = step.noted(WEIGHTS)
            before, after = digests.get("before"), digests.get("after")
            if step.is_in_pieces or not before or not after:
                continue
            twice: list[str] = []
            for number, (one, gradient) in enumerate(zip(step.parameters, step.parts(step.received), strict=True)):
                if number not in moved or one.guessed or not bool(gradient.any()):
                    continue
                other, received, left = last.get(one.name, (step, gradient, None))
                is_another = other.optimizer != step.optimizer and bool(_passes(other) & _passes(step))
                is_the_same = left is not None and left == before[number]
                if is_another and is_the_same and torch.equal(gradient, received):
                    twice.append(one.name)
                last[one.name] = step, gradient, after[number]
            if twice:
                return failed_with_hint(
                    "steps",
                    f"two optimizers update {listed(twice)} with the same gradient{FIRST_SEEN}",
                    "give each parameter to one optimizer; a tied weight is one parameter",
                    cause="stepped-by-two-optimizers",
                    family="optimizer",
                    step=step.number,
                    rank=rank.rank,
                )
    return None


def _moved(step: RecordedStep) -> set[int]:
    rows = step.noted(OBSERVER).get("parameters", ())
    return {int(number) for number, _, _, _, made, *_ in rows if made}


def _passes(step: RecordedStep) -> set[int]:
    return {one.number for one in (*step.passes, *step.other_passes)}


def _changed_weights(training: RecordedTraining) -> Iterator[Finding]:
    changed = [(one, one.facts["outside"]) for one in noted(training, OBSERVER)]
    yield from _note_change(changed, "", "weight clipping, averaging, a checkpoint")


def _changed_states(training: RecordedTraining) -> Iterator[Finding]:
    changed = [(one, changed_state(one)) for one in noted(training, OBSERVER) if not one.step.skipped]
    yield from _note_change(changed, "The optimizer's state of ", "a new optimizer, a reset, a checkpoint")


def _note_change(
    steps: Sequence[tuple[ObserverFacts, Sequence[int]]], what: str, reasons: str
) -> Iterator[HeadlineNote]:
    first, numbers = next(((one, numbers) for one, numbers in steps if numbers), (None, ()))
    if first is not None:
        names = [first.parameter(number) for number in numbers]
        yield headline_note(
            "update",
            f"{what}{counted(len(names), 'parameter')} changed between optimizer steps, first before {first.name} on "
            f"rank {first.rank}: {listed(names)}. This change was not judged. Possible causes: {reasons}.",
        )
