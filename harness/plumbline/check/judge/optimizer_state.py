"""Checks that each rank's optimizer began its steps with the state that the previous step left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from plumbline.check.evidence.training import RecordedTraining, ScriptStep
from plumbline.check.judge.noted import ObserverFacts, noted, side_by_side
from plumbline.core.finding import Finding
from plumbline.report.text import listed

OBSERVER = "optimizer-state"

FEWEST_OTHERS = 2
"""Smallest number of replaced optimizers that is a failure. Chosen: one replacement may be intended, after warm-up or
unfreezing."""


def judge_optimizer_state(training: RecordedTraining) -> list[Finding]:
    """Find states that are lost at each step, exchanged between parameters or ranks, or reset on some ranks only."""
    if (lost := _lost_at_each_step(training)) is not None:
        return [lost]
    found = (_permuted(ranks) or _begun_anew(ranks) for ranks in side_by_side(training, OBSERVER))
    return [*filter(None, found)][:1]


def changed_state(one: ScriptStep) -> list[int]:
    """Return the numbers of the parameters whose state was reset, or changed since the previous step."""
    facts = one.step.noted(OBSERVER)
    return sorted({*(number for number, *_ in facts.get("changed", ())), *facts.get("anew", ())})


def _lost_at_each_step(training: RecordedTraining) -> Finding | None:
    """Find parameters that each step updates with a different optimizer, created after the previous step.

    An optimizer that is created only now and then may be intended. So may one that evaluates the loss several times
    within a step, or that begins with weights that were changed as well.
    """
    for rank in training.ranks:
        takers: dict[tuple[str, ...], list[ObserverFacts]] = {}
        for one in noted(training, OBSERVER):
            if one.rank == rank.rank and not one.step.skipped:
                takers.setdefault(one.parameters, []).append(one)
        for first, *others in takers.values():
            if len(others) >= FEWEST_OTHERS and all(map(_begins_anew, others)):
                kind = first.step.facts["update"]["class"]
                return others[0].failed(
                    "update",
                    f"each of {1 + len(others)} steps uses a new {kind}, created after the previous step, so "
                    "the optimizer's state is lost at every step",
                    "create the optimizer once, before the loop over batches",
                    cause="optimizer-made-for-each-step",
                    family="optimizer",
                )
    return None


def _begins_anew(one: ObserverFacts) -> bool:
    update = one.step.noted("update")
    is_replayed = bool(update) and not update["why"] and not update["outside"]
    return is_replayed and bool(one.facts["anew"])


def _permuted(ranks: Mapping[int, ObserverFacts]) -> Finding | None:
    """Find a state that belonged to another parameter or another rank, which has a different state now."""
    before = {
        last: (rank, number)
        for rank, one in ranks.items()
        for number, last, now in one.facts["changed"]
        if last and now
    }  # fmt: skip
    for rank, one in ranks.items():
        for number, _, now in _changed(one):
            other, its = before.get(now, (rank, number))
            if (other, its) != (rank, number):
                return one.failed(
                    "update",
                    f"the state of {one.parameter(number)} on rank {rank} equals the previous state of "
                    f"{ranks[other].parameter(its)} on rank {other}",
                    "load each rank's own state, in the order of the optimizer's parameters",
                    cause="states-permuted",
                    family="optimizer",
                )
    return None


def _begun_anew(ranks: Mapping[int, ObserverFacts]) -> Finding | None:
    if len({one.parameters for one in ranks.values()}) > 1:
        return None
    everywhere = {now for one in ranks.values() for _, _, now in one.facts["changed"] if now}
    anew = {
        rank: {number for number, last, now in _changed(one) if last and not now and last not in everywhere}
        for rank, one in ranks.items()
    }
    held = {rank: set(one.facts["held"]) for rank, one in ranks.items()}
    kept = set.union(*(held[rank] - anew[rank] for rank in ranks))
    for rank, one in ranks.items():
        lost = anew[rank] & kept
        if not lost and anew[rank] == held[rank] and any(held[other] and not anew[other] for other in ranks):
            lost = anew[rank]  # each rank has the state of other parameters
        if lost:
            names = listed([one.parameter(number) for number in sorted(lost)])
            return one.failed(
                "update",
                f"rank {rank} starts with a new optimizer state for {names}, but other ranks keep theirs",
                "restore or reset the optimizer's state on all ranks",
                cause="state-begun-anew",
                family="optimizer",
            )
    return None


def _changed(one: ObserverFacts) -> Iterator[tuple[int, int, int]]:
    """Yield changed states, except for parameters whose weights changed as well: both may be intended together."""
    outside = one.step.noted("update").get("outside", ())
    return ((number, last, now) for number, last, now in one.facts["changed"] if number not in outside)
