"""The share of a training's trainable parameters that was judged, and why the rest was not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbline.check.evidence.training import REPEATS, RecordedStep, RecordedTraining
from plumbline.check.judge.joint_truth import JointTruth
from plumbline.check.judge.judged_gradients import (
    ALIKE_PARTS,
    NOT_FINITE,
    OWN_VALUES,
    REDUCED_IN_STEP,
    JudgedGradients,
    judged_gradients,
)
from plumbline.check.judge.recomputation import recomputed_unjudged
from plumbline.check.judge.replayed_updates import NOT_MOVED, Key, replayed_updates
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.replay.reasons import OUTSIDE

NO_REPLAY = "backward passes were not recomputed"
IN_PARTS = "each rank holds a different part"
LATE = "the optimizer took no step during the recording; use --after N to record later steps"
NO_STEP = "the optimizer took no recorded step; record more steps"
NO_GRADIENT = "no gradient in the recorded steps"
ZERO_GRADIENT = "zero gradient in the recorded steps"
NOT_FOLLOWED = "the gradient did not come from a recorded backward pass"
NOT_SHARED = "not in the optimizer of every rank"
REMOVED = "the script sets the gradient to None before the step"
NO_REPLAYED_STEP = "the optimizer's step was not recomputed"
RECOMPUTED = (
    "an activation checkpoint may have computed different values than the forward, and the gradient could not be "
    "recomputed"
)
ONLY_REDUCED = "only the reduction was judged"
NO_ANSWER = "for the reason, see the line “gradients”"

COPIES_OR_PARTS = (
    "the initial values are equal on several ranks, so the gradient is right for shards, but wrong for replicas"
)
UNSEARCHED = "the search stopped after it found other wrong gradients"
TOO_SMALL = "the gradient is too small to distinguish from rounding error, or no recorded forward uses the parameter"

_REASONS = {
    ALIKE_PARTS: "all ranks compute the same gradient",
    OWN_VALUES: OWN_VALUES,
    NOT_FINITE: "the gradient was not finite",
    REDUCED_IN_STEP: "the optimizer's step communicates",
}

GUESSED = "several parameters have equal values, so their copies in the optimizer cannot be told apart"
NOT_SAMPLED = "not in the sample of --sample-parameters"


@dataclass(frozen=True)
class Uncovered:
    """Parameters that were left out, for one reason; ``entries`` counts their elements."""

    why: str
    names: tuple[str, ...]
    entries: int


@dataclass(frozen=True)
class Share:
    """``entries`` of ``of`` parameter elements were judged. ``left_out``: the reasons for the others, largest first."""

    entries: int
    of: int
    left_out: tuple[Uncovered, ...]

    @property
    def part(self) -> float:
        return self.entries / self.of if self.of else 0.0


@dataclass(frozen=True)
class Coverage:
    """How many elements of the trainable parameters were judged. Parameters that all ranks hold count once.

    ``gradients`` and ``updates``: elements whose gradient or update was compared with a nonzero one, so that it could
    have differed. ``replays``: elements whose gradient was also recomputed. ``is_joint``: all ranks recomputed the
    forward together, which they always do in float64. ``repeats``: some steps were not recomputed, because earlier
    ones of the same kind were.
    """

    gradients: Share
    updates: Share
    replays: Share
    is_joint: bool
    repeats: bool = False

    @property
    def entries(self) -> int:
        """The elements of all parameters."""
        return self.gradients.of

    @property
    def nothing_moved(self) -> bool:
        """Whether no weight was due to move in any recorded step, and none did."""
        return not self.updates.entries and {one.why for one in self.updates.left_out} == {NOT_MOVED}


def coverage_of(training: RecordedTraining, findings: Iterable[Finding] = ()) -> Coverage:
    """Return what was judged of a training.

    ``findings``: the findings about it. If the check of gradients has no verdict, no gradient counts as judged.
    """
    pieces = {step.optimizer for step in training.steps if step.is_in_pieces}
    entries = {
        (step.optimizer, one.name): one.entries
        for step in training.steps
        for one in step.parameters
        if one.trained and (step.is_in_pieces or step.optimizer not in pieces)
    }
    unstepped = {key: size for key, size in _without_steps(training, "unstepped") if key not in entries}
    late = {(-1 - number, name): size for (number, name), size in _without_steps(training, "late")}
    late = {key: size for key, size in late.items() if key not in entries}
    never = dict.fromkeys(unstepped, NO_STEP) | dict.fromkeys(late, LATE)
    entries |= unstepped | late
    answered = [one for one in findings if one.check == "gradients"]
    gradients = dict(_gradients_left_out(training, judged_gradients(training)))
    gradients = dict.fromkeys(sorted(recomputed_unjudged(training)), RECOMPUTED) | gradients
    no_answer: dict[Key, str] = {}
    if answered and all(one.outcome in (Outcome.SKIPPED, Outcome.ERRORED) for one in answered):
        no_answer = dict.fromkeys(entries, NO_ANSWER)
        gradients = no_answer | {key: why for key, why in gradients.items() if key in entries}
    replays = _replays_left_out(training)
    joint = JointTruth(training)
    is_joint = bool(joint.compared)
    if is_joint and any(one.outcome is Outcome.FAILED for one in answered):
        is_joint = joint.judge().outcome is Outcome.FAILED  # otherwise the ranks' own passes showed the failure
    if is_joint:
        left_out = dict(_not_compared_jointly(training, joint))
        known = {key: why for key, why in replays.items() if why == OUTSIDE} | gradients
        gradients = no_answer | {key: _reason(key, why, known) for key, why in left_out.items()}
        replays = {key: why for key, why in replays.items() if key in left_out}
    elif joint.obstacle and not joint.compared:
        gradients = dict.fromkeys(replays, f"{ONLY_REDUCED}: {joint.obstacle}") | gradients
    return Coverage(
        _share(entries, gradients | never),
        _share(entries, _updates_left_out(training, entries) | never),
        _share(entries, replays | never),
        is_joint,
        any(REPEATS in one.facts for step in training.steps for one in step.passes),
    )


def _not_compared_jointly(training: RecordedTraining, joint: JointTruth) -> Iterator[tuple[Key, str]]:
    """Yield each parameter that was not compared with the joint forward on every rank that holds it, and why."""
    doubtful = joint.doubtful | joint.alike
    judged = joint.judged | {(name, rank) for name, ranks in joint.unreduced for rank in ranks}
    cut_off = {(name, rank) for name, ranks in joint.cut_off for rank in ranks}
    for rank in training.ranks:
        for step in rank.steps:
            for one in step.parameters:
                if (one.name, rank.rank) not in judged:
                    why = UNSEARCHED if (one.name, rank.rank) in joint.unsearched else TOO_SMALL
                    why = NO_GRADIENT if (one.name, rank.rank) in cut_off else why
                    why = COPIES_OR_PARTS if (one.name, rank.rank) in doubtful else why
                    yield (step.optimizer, one.name), why


def _reason(key: Key, why: str, others: Mapping[Key, str]) -> str:
    known = others.get(key)
    return known if why == TOO_SMALL and known in (NO_GRADIENT, ZERO_GRADIENT, NOT_SAMPLED, OUTSIDE, GUESSED) else why


def _share(entries: Mapping[Key, int], why: Mapping[Key, str]) -> Share:
    why = {key: reason for key, reason in why.items() if key in entries}
    left_out = []
    for reason in dict.fromkeys(why.values()):
        keys = [key for key, value in why.items() if value == reason]
        left_out.append(Uncovered(reason, tuple(name for _, name in keys), sum(entries[key] for key in keys)))
    judged = sum(size for key, size in entries.items() if key not in why)
    return Share(judged, sum(entries.values()), tuple(sorted(left_out, key=lambda one: -one.entries)))


def _without_steps(training: RecordedTraining, kind: str) -> Iterator[tuple[Key, int]]:
    for rank in training.ranks:
        for optimizer, parameters in rank.noted(kind).items():
            for name, size in parameters.items():
                yield (int(optimizer), name), size


def _gradients_left_out(training: RecordedTraining, evidence: JudgedGradients) -> Iterator[tuple[Key, str]]:
    """Yield each parameter of a recorded step whose gradient was not compared, and why."""
    compared: set[Key] = set()
    known: dict[Key, str] = {}
    for case in evidence.judged:
        for parameter, is_compared, removed in zip(case.parameters, case.compared, case.removed, strict=True):
            key = (case.step.optimizer, parameter.name)
            if is_compared:
                compared.add(key)
            elif removed:
                known[key] = REMOVED
            elif parameter.guessed:
                known[key] = GUESSED
            elif parameter.name in case.parts:
                known[key] = IN_PARTS if parameter.named else OWN_VALUES
    for why, reason in _REASONS.items():
        for case in evidence.unjudged.get(why, ()):
            known |= {(case.step.optimizer, one.name): reason for one in case.parameters}
    shared = {(case.step.optimizer, one.name) for case in evidence.cases for one in case.parameters}
    for rank in training.ranks:
        reasons = rank.noted("uncovered")
        for step in rank.steps:
            for index, parameter in enumerate(step.parameters):
                key = (step.optimizer, parameter.name)
                if key in compared or not parameter.is_held:
                    continue
                if not parameter.sampled:
                    yield key, NOT_SAMPLED
                elif key in known:
                    yield key, known[key]
                elif shared and key not in shared:
                    yield key, NOT_SHARED
                else:
                    yield key, _why_not_compared(rank.steps, key, index, reasons.get(parameter.name))


def _why_not_compared(steps: Iterable[RecordedStep], key: Key, place: int, reason: str | None) -> str:
    own = [
        step.parts(step.received)[place]
        for step in steps
        if step.optimizer == key[0] and [one.name for one in step.parameters[place : place + 1]] == [key[1]]
    ]
    if all(bool(part.isnan().all()) for part in own):
        return NO_GRADIENT
    if not any(bool(part.nan_to_num().any()) for part in own):
        return ZERO_GRADIENT
    return reason or NOT_FOLLOWED


def _updates_left_out(training: RecordedTraining, entries: Iterable[Key]) -> dict[Key, str]:
    updates = replayed_updates(training)
    judged, why = updates.judged, updates.left_out
    return {key: why.get(key, NO_REPLAYED_STEP) for key in entries if key not in judged}


def _replays_left_out(training: RecordedTraining) -> dict[Key, str]:
    """Return why a parameter was not replayed on some rank in some step, or that no gradient arrived at all.

    Passes that repeat a replayed one count as replayed.
    """
    why: dict[Key, str] = {}
    arrived: set[Key] = set()
    every: set[Key] = set()
    for rank in training.ranks:
        for step in rank.steps:
            for name, reason, reached in _replayed(step, rank.noted("uncovered")):
                key = (step.optimizer, name)
                every.add(key)
                if reached:
                    arrived.add(key)
                if reason:
                    why.setdefault(key, reason)
    return why | {key: NO_GRADIENT for key in sorted(every - arrived) if key not in why}


def _replayed(step: RecordedStep, reasons: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """Yield each parameter's name, why it was not replayed ("" if it was), and whether a gradient arrived."""
    reached = [_holds_any(one.local != 0, step) for one in step.passes]
    unknown = [
        there & (REPEATS not in one.facts if one.exact is None else _holds_any(one.exact.isnan(), step))
        for there, one in zip(reached, step.passes, strict=True)
    ]
    for index, parameter in enumerate(step.parameters):
        why = reasons.get(parameter.name, NO_REPLAY) if any(bool(one[index]) for one in unknown) else ""
        why = why if parameter.sampled else NOT_SAMPLED
        yield parameter.name, why, any(bool(one[index]) for one in reached)


def _holds_any(marked: Tensor, step: RecordedStep) -> Tensor:
    lengths = torch.tensor([one.length for one in step.parameters])
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
    return torch.zeros(len(lengths), dtype=torch.long).index_add_(0, numbers, marked.long()) > 0
