"""How far updates are from their replays, and which of them cannot be judged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.model_parts import forward_communicates
from plumbline.check.judge.near_replay import BY_SHARD, NearReplay, near_replays
from plumbline.check.judge.noted import ObserverFacts, noted
from plumbline.check.judge.step_objective import is_loss_divided
from plumbline.judge.oracle.noise import Deviation, in_noise, limit

OBSERVER = "update"
NOT_MOVED = "the right updates of the recorded steps do not move it"

BY_TURNS = (
    "the step takes whole matrices at some steps and each rank's shard alone at others, as block-periodic optimizers do"
)
ADDED_UP = (
    "the step adds up the ranks' gradients, which is right only if each rank divides its loss by the number of ranks; "
    "the loss is not known"
)

Key = tuple[int, str]
"""The number of an optimizer and the name of one of its parameters."""


def replayed_updates(training: RecordedTraining) -> ReplayedUpdates:
    """Return how far the weights after each step are from its replay."""
    # Ranks that compute one loss together may well add up what each has of its gradient.
    is_divided = None if forward_communicates(training) else is_loss_divided(training.ranks)
    updates = ReplayedUpdates(is_divided, _in_blocks_at_times(training))
    for one in noted(training, OBSERVER):
        updates.add(one)
    return updates


@dataclass(eq=False)
class ReplayedUpdates:
    """Errors of all parameters that were judged, with the step of each, and why others were not.

    ``is_loss_divided``: whether each rank divides its loss by the number of ranks, None where that is not known.
    ``in_blocks_at_times``: the parameters that are stepped as a whole at some steps, and shard by shard at others.
    """

    is_loss_divided: bool | None = None
    in_blocks_at_times: Set[Key] = frozenset()
    errors: list[tuple[Deviation, ObserverFacts]] = field(default_factory=list)
    why: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    _moved: set[tuple[int, Key]] = field(default_factory=set)
    _reasons: dict[tuple[int, Key], str] = field(default_factory=dict)

    @property
    def judged(self) -> set[Key]:
        """The parameters that a judged step moved, or should have, on every rank whose step moves them."""
        return {key for _, key in self._moved} - self.left_out.keys()

    @property
    def left_out(self) -> dict[Key, str]:
        """Why some update of a parameter was not judged on some rank, or none was due to move it on any."""
        moved = {key for _, key in self._moved}
        return {key: why for (_, key), why in self._reasons.items() if why != NOT_MOVED or key not in moved}

    def add(self, one: ObserverFacts) -> None:
        """Take a step that an optimizer took on one rank."""
        if one.step.skipped:
            return
        doubt = "" if one.facts["why"] or _repeats(one) else _why_inconclusive(one)
        reasons: dict[str, list[int]] = {one.facts["why"] or doubt: one.numbers}
        reasons |= {why: numbers for why, numbers in one.facts["unjudged"].items() if not one.facts["why"]}
        self._note(one, reasons)
        if why := one.facts["why"]:
            self.why[why].update()
            return
        for why, numbers in one.facts["unjudged"].items():
            self.why[why].update(dict.fromkeys(map(one.parameter, numbers)))
        if doubt:
            self.why[doubt].update()
            return
        near = near_replays(one)
        for number, error, noise, due, made, *_ in one.facts["parameters"]:
            name = one.parameter(int(number))
            known = near.get(int(number))
            if known is not None and known.is_added and self.is_loss_divided:
                known = known.as_added
            if known is not None and (why := self._why_unknown(known, one, name, error, noise)):
                self.why[why].update({name: None})
                self._note(one, {why: [int(number)]})
                continue
            if known is not None and (known.is_right or known.mistake):
                error, noise = known.nearest, known.noise
            self.errors.append((Deviation(in_noise(error, noise), one.step.number, name, one.rank), one))
            if due or made:
                held = one.held_in(int(number))
                self._moved.update((one.rank, (one.step.optimizer, each)) for each in held)

    def _why_unknown(self, known: NearReplay, one: ObserverFacts, name: str, error: float, noise: float) -> str:
        """Return why it is not known whether an update is right, "" if that is known."""
        if (one.step.optimizer, name) in self.in_blocks_at_times:
            return BY_TURNS
        if known.is_added and self.is_loss_divided is None:
            return ADDED_UP
        return known.why_unknown(one, error, noise)

    def _note(self, one: ObserverFacts, reasons: Mapping[str, Sequence[int]]) -> None:
        for why, numbers in reasons.items():
            for name in (name for number in numbers for name in one.held_in(number)):
                key = one.rank, (one.step.optimizer, name)
                if why or key not in self._reasons:
                    self._reasons[key] = why or NOT_MOVED


def _why_inconclusive(one: ObserverFacts) -> str:
    name = one.facts["class"]
    if not one.facts["of_torch"]:
        return f"{name} is not a class of torch.optim, and a copy of it gives a different result for the same step"
    if one.facts["hooks"]:
        return f"hooks of the script run within the step of {name}, so other code may have changed the weights"
    if one.facts["shared"]:
        return "the parameters are in memory that other processes share, so they may change during the step"
    return ""


def _repeats(one: ObserverFacts) -> bool:
    """Return whether the step is the replay's and, of other classes, that of a copy in its own precision."""
    return all(
        in_noise(row[1], row[2]) <= limit() and in_noise(row[6], row[7]) <= limit()
        for row in one.facts["parameters"]
        if str(int(row[0])) not in one.facts.get("close", {})
    )


def _in_blocks_at_times(training: RecordedTraining) -> set[Key]:
    whole: set[Key] = set()
    blocks: set[Key] = set()
    for one in noted(training, OBSERVER):
        for number, known in near_replays(one).items():
            key = one.step.optimizer, one.parameter(number)
            if known.takes_whole:
                whole.add(key)
            elif known.mistake == BY_SHARD:
                blocks.add(key)
    return whole & blocks
