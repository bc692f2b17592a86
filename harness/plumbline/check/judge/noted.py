"""Reads what observers noted about steps, about the same step on all ranks, and about backward passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from plumbline.check.evidence.training import BackwardPass, Facts, RecordedRank, RecordedTraining, ScriptStep
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence import training_record
from plumbline.evidence.training_record import StepOfRanks
from plumbline.judge.causes.stage_pattern import ranks_in_words
from plumbline.judge.findings import Information, failed, failed_with_hint

FIRST_SEEN = "; first seen"
"""Separates an observation that may recur from the place where it was first made."""

STEPS_WITHIN_PASSES = "optimizers step during the backward pass, before it is known what it began with"
"""Why the losses and samples of some scripts are not judged."""

IF_INTENDED = "it is not known whether this is intended: "
"""Precedes the reason why an observation may be right."""


@dataclass(frozen=True, eq=False)
class ObserverFacts(ScriptStep):
    """What one observer noted about one step of one rank."""

    facts: Facts = field(kw_only=True)

    @property
    def name(self) -> str:
        """The step in words, for messages."""
        return f"step {self.step.number}" + (f" of optimizer {self.step.optimizer}" if self.step.optimizer else "")

    def parameter(self, number: int) -> str:
        """Return the name of the optimizer's parameter with this number, or of the first piece in it."""
        return self.held_in(number)[0]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the optimizer's parameters, in the order of its groups."""
        if self.step.is_in_pieces:
            return sorted(self.step.pieces.keys() - {-1})
        return [*range(len(self.step.parameters))]

    def held_in(self, number: int) -> list[str]:
        """Return the names of the parameters of which the optimizer's parameter with this number holds pieces."""
        if self.step.is_in_pieces:
            names = self.step.pieces.get(number, [])
        else:
            names = [one.name for one in self.step.parameters[number : number + 1]]
        return [*names] or [f"parameter {number} of the optimizer"]

    def failed(self, check: str, observed: str, hint: str = "", **cause_and_parameter: str) -> Finding:
        """Return a failure with what was observed, that it was first seen at this step, and what to do."""
        details: dict[str, Any] = {"step": self.step.number, "rank": self.rank, **cause_and_parameter}
        first = f"{observed}{FIRST_SEEN}"
        return failed_with_hint(check, first, hint, **details) if hint else failed(check, first, **details)


def noted(training: RecordedTraining, observer: str) -> Iterator[ObserverFacts]:
    for one in training.optimizer_steps:
        if observer in one.step.facts:
            yield ObserverFacts(one.rank, one.number, one.optimizer, step=one.step, facts=one.step.facts[observer])


def side_by_side(training: RecordedTraining, observer: str) -> Iterable[StepOfRanks[ObserverFacts]]:
    """Return what an observer noted about the same step of each rank that took it, by rank."""
    return training_record.side_by_side(noted(training, observer))


def information(check: str, message: str, step: int | None = None) -> Information:
    """Return a note on what the script does, if that is not wrong."""
    return Information(check, Outcome.PASSED, message, step=step)


@dataclass(frozen=True)
class HeadlineNote(Information):
    """A note, in whole sentences, on what is so likely to be a mistake that it appears right below the verdict."""


def headline_note(check: str, sentences: str) -> HeadlineNote:
    """Return a note on what the script does, and what to do if that is not intended."""
    return HeadlineNote(check, Outcome.PASSED, sentences)


def not_judged(check: str, why: str, step: int | None = None) -> Finding:
    """Return the finding of a check without a verdict: ``skipped``, with the reason."""
    return Finding(check, Outcome.SKIPPED, f"not judged: {why}", step=step)


def failed_observers(training: RecordedTraining, observer: str, check: str) -> Iterator[Finding]:
    for rank in training.ranks:
        if error := rank.noted(observer).get("error"):
            yield not_judged(check, f"recording failed on rank {rank.rank}: {error}")
            return


def amount(number: float) -> str:
    """Return a count such as ``1,024``; a fractional one, as of weighted terms, in six digits."""
    return f"{number:,.0f}" if number == int(number) else f"{number:,.6g}"


def passes_of(rank: RecordedRank) -> list[BackwardPass]:
    found = {one.number: one for step in rank.steps for one in (*step.other_passes, *step.passes)}
    return [found[number] for number in sorted(found)]


def steps_within_passes(training: RecordedTraining) -> bool:
    """Return whether optimizers step during a backward pass, so that what is noted at its end comes too late."""
    passes = [one for rank in training.ranks for one in passes_of(rank)]
    return bool(passes) and not any(isinstance(noted, dict) for one in passes for noted in one.facts.values())


def forwards_of(rank: RecordedRank, observer: str) -> list[Facts]:
    """Return what an observer noted about the forwards of a rank, in their order."""
    return [made for one in passes_of(rank) for made in one.noted(observer).get("forwards", ())]


def aligned_forwards(training: RecordedTraining, observer: str) -> Iterator[tuple[int, Sequence[Facts]]]:
    """Yield the number of each forward, and what an observer noted about it on every rank.

    Stops when a rank has no more forwards, or when ranks call different modules.
    """
    for index, forwards in enumerate(zip(*(forwards_of(rank, observer) for rank in training.ranks), strict=False)):
        if len({forward.get("module") for forward in forwards}) > 1:
            return
        yield index, forwards


def name_ranks(ranks: Sequence[int], world_size: int) -> str:
    """Return ``all ranks``, ``rank 0``, ``ranks 0 and 1`` or ``ranks 0, 2 and 4``."""
    return "all ranks" if len(ranks) == world_size else ranks_in_words(ranks)
