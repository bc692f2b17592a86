"""How far updates are from their replays and from known mistakes, and which of them cannot be judged.

A replay computes the update again from the recorded weights, gradients and state. An optimizer that computes in 16
bits, as Muon does, rounds so much that its distance from a replay in float64 would hide many mistakes. However, it
repeats its own roundings. Such an update is right if its distance from a replay in its own precision is at most what
one more rounding of the gradient explains. It is wrong if it matches a known mistake.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache

from plumbline.check.evidence.training import Facts, RecordedTraining
from plumbline.check.judge.noted import ObserverFacts, noted
from plumbline.check.judge.optimizer_state import changed_state
from plumbline.check.judge.rank_weights import forward_communicates, weights_at
from plumbline.check.judge.step_objective import is_loss_divided
from plumbline.judge.oracle.noise import Deviation, in_noise, limit

ALIKE = 1e-3
"""Largest distance of an update from a mistake's result, relative to the change that the mistake causes.

Chosen: an update is known to three digits from rounded weights. An update that matches no known mistake is not called
wrong because of this.
"""

LARGE = 0.1
"""Stepping shard by shard counts as wrong only if it changes the update by at least this part.

Chosen: it withholds a failure if a state is quantised in blocks, which begin anew in each shard.
"""

_SCALED = "scaled "

STILL = ("still", "decay-only")
"""Steps that do not move a parameter, or only apply its weight decay."""

BY_SHARD, ADDED = "by-shard", "added"
"""A separate step for each shard, and a step with the sum of the ranks' gradients instead of their mean."""


@dataclass(frozen=True)
class NearReplay:
    """Distances of one update from replays and from known mistakes.

    ``nearest``: the distance from the nearest replay. ``tight``: how large rounding can make that distance. ``others``:
    for each mistake, the update's distance from the mistake's result, and that result's distance from the right update.
    """

    nearest: float
    tight: float
    others: Mapping[str, tuple[float, float]]

    @property
    def x_tight(self) -> float:
        """The distance from the nearest replay, in multiples of what rounding explains."""
        return in_noise(self.nearest, self.tight)

    @property
    def is_right(self) -> bool:
        """Whether the update repeats a replay, or differs by rounding that could hide no known mistake."""
        return self.nearest == 0 or (self.x_tight <= limit() and not self.could_hide)

    @property
    def is_added(self) -> bool:
        """Whether the step adds up the ranks' gradients, although their mean would give a different update.

        That is right if the loss is divided by the number of ranks.
        """
        return ADDED in self.others and in_noise(self.others[ADDED][0], self.tight) <= limit() < self.x_tight

    @property
    def as_added(self) -> NearReplay:
        """The same update, judged for a training in which the sum is right."""
        return replace(self, nearest=self.others[ADDED][0], others={})

    @property
    def moves_rightly(self) -> bool:
        """Whether the update is right, and leaving the parameter unchanged would have been wrong."""
        return self.is_right and self.others.get("still", (0.0, 0.0))[1] > limit() * self.tight

    @property
    def could_hide(self) -> bool:
        """Whether rounding could hide a step that no rank takes, updates that are summed, or steps shard by shard."""
        apart = [self._material.get(name, (0.0, 0.0))[1] for name in ("still", "summed", BY_SHARD)]
        return any(0 < one <= 2 * limit() * self.tight for one in apart)

    @property
    def mistake(self) -> str:
        """The known mistake that the update matches, "" if it is right or matches none."""
        if self.is_right:
            return ""
        if self.is_added:
            return ADDED
        repeated = [name for name, (far, apart) in self._material.items() if far == 0]
        if repeated:
            return repeated[0]
        alike = {name: far / apart for name, (far, apart) in self._material.items() if apart > limit() * self.tight}
        name = min(alike, key=alike.__getitem__, default="")
        return name if name and alike[name] <= ALIKE else ""

    @property
    def _material(self) -> Mapping[str, tuple[float, float]]:
        """The mistakes that change the update; separate steps of shards only if they change much of it."""
        least = {BY_SHARD: LARGE * self.others.get("still", (0.0, 0.0))[1]}
        return {name: (far, apart) for name, (far, apart) in self.others.items() if apart > least.get(name, 0.0)}

    @property
    def factor(self) -> str | None:
        """The factor by which an otherwise right update, without weight decay, is scaled; None if there is none."""
        return self.mistake.removeprefix(_SCALED) if self.mistake.startswith(_SCALED) else None

    @property
    def decays(self) -> bool:
        return "decay-lost" in self.others

    @property
    def noise(self) -> float:
        """The noise of ``nearest``; 0 if rounding would otherwise excuse an update that matches a mistake."""
        return 0.0 if self.mistake and self.x_tight <= limit() else self.tight

    def why_unknown(self, one: ObserverFacts, error: float, noise: float) -> str:
        """Return why it is not known whether the update is right, "" if that is known."""
        name = one.facts["class"]
        if self.is_right:
            return ""
        if one.facts["hooks"]:
            return f"hooks of the script run within the step of {name}, so other code may have changed the weights"
        if self.mistake or (one.facts["of_torch"] and in_noise(error, noise) > limit()):
            return ""
        if one.facts["of_torch"] or self.x_tight <= limit():
            return f"the rounding of {name} could hide a wrong update"
        return differs_from_its_copy(name)


def differs_from_its_copy(name: str) -> str:
    """Return why steps of an optimizer class that is not torch's own cannot be judged."""
    return f"{name} is not a torch.optim class, and a copy of it gives a different result for the same step"


def near_replays(one: ObserverFacts) -> dict[int, NearReplay]:
    """Return the comparisons of a step's updates with near replays, by parameter number."""
    found = {}
    for number, known in one.facts.get("close", {}).items():
        others = {name: (far, apart) for name, (far, apart) in known["others"].items()}
        found[int(number)] = NearReplay(known["nearest"], known["tight"], others)
    return found


OBSERVER = "update"
NOT_MOVED = "no recorded step should have changed it"

BY_TURNS = (
    "some steps update whole matrices and others update each rank's shard separately, as block-periodic optimizers do"
)
AT_TIMES = "the optimizer updates it at some steps only, as block-coordinate optimizers do"
BY_PLACE = "the optimizer scales the updates of some parameters, but not those of others of the same shape"
OF_ALL = "each update depends on all parameters of the optimizer, and the ranks hold different ones"
CHANGED = "the script also changes the weights between optimizer steps, and that was not judged"
STATE_CHANGED = "the script also changes the optimizer's state between steps, and that was not judged"
ADDED_UP = (
    "the step adds up the ranks' gradients. That is right only if each rank divides its loss by the number of ranks, "
    "which could not be determined"
)

Key = tuple[int, str]
"""The number of an optimizer and the name of one of its parameters."""


@lru_cache(maxsize=1)
def replayed_updates(training: RecordedTraining) -> ReplayedUpdates:
    """Return how far the weights after each step are from its replay."""
    # Ranks that compute one loss together may rightly add up their shares of the gradient.
    is_divided = None if forward_communicates(training) else is_loss_divided(training.ranks)
    updates = ReplayedUpdates(is_divided, _by_turns(training), _steps_of_replicas(training))
    for one in noted(training, OBSERVER):
        updates.add(one)
    return updates


@dataclass(eq=False)
class ReplayedUpdates:
    """Errors of all parameters that were judged, each with its step, and why others were not judged.

    ``is_loss_divided``: whether each rank divides its loss by the number of ranks, None if unknown. ``by_turns``: why
    it may be intended that a parameter is stepped differently at different steps. ``of_replicas``: the optimizer and
    the number of each step in which all ranks have the same weights; None if there is one rank.
    """

    is_loss_divided: bool | None = None
    by_turns: Mapping[Key, str] = field(default_factory=dict)
    of_replicas: Set[tuple[int, int]] | None = None
    errors: list[tuple[Deviation, ObserverFacts]] = field(default_factory=list)
    why: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    _moved: set[tuple[int, Key]] = field(default_factory=set)
    _reasons: dict[tuple[int, Key], str] = field(default_factory=dict)

    @property
    def judged(self) -> set[Key]:
        """The parameters that a judged step moved, or should have moved, on every rank whose step moves them."""
        return {key for _, key in self._moved} - self.left_out.keys()

    @property
    def left_out(self) -> dict[Key, str]:
        """Why an update of a parameter was not judged on some rank, or that no step should have moved it on any."""
        moved = {key for _, key in self._moved}
        return {key: why for (_, key), why in self._reasons.items() if why != NOT_MOVED or key not in moved}

    def add(self, one: ObserverFacts) -> None:
        if one.step.skipped:
            return
        doubt = "" if one.facts["why"] or _repeats(one) else _why_inconclusive(one)
        if one.facts.get("coupled") and not self._is_of_replicas(one):
            doubt = doubt or OF_ALL
        reasons: dict[str, list[int]] = {one.facts["why"] or doubt: one.numbers}
        reasons |= {why: numbers for why, numbers in one.facts["unjudged"].items() if not one.facts["why"]}
        self._note(one, reasons | {STATE_CHANGED: changed_state(one), CHANGED: one.facts["outside"]})
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

    def _is_of_replicas(self, one: ObserverFacts) -> bool:
        return self.of_replicas is None or (one.step.optimizer, one.step.number) in self.of_replicas

    def _why_unknown(self, known: NearReplay, one: ObserverFacts, name: str, error: float, noise: float) -> str:
        if why := self.by_turns.get((one.step.optimizer, name)):
            return why
        if known.factor and _has_right_one_of_shape(one, name):
            return BY_PLACE
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
        return differs_from_its_copy(name)
    if one.facts["hooks"]:
        return f"hooks of the script run within the step of {name}, so other code may have changed the weights"
    if one.facts["shared"]:
        return "the parameters are in memory that other processes share, so they may change during the step"
    return ""


def _repeats(one: ObserverFacts) -> bool:
    """Return whether the step matches its replay and, for classes outside torch, a copy in its own precision."""
    return all(
        in_noise(row[1], row[2]) <= limit() and in_noise(row[6], row[7]) <= limit()
        for row in one.facts["parameters"]
        if str(int(row[0])) not in one.facts.get("close", {})
    )


def steps_with_own_gradients(facts: Facts) -> bool:
    """Return whether a step that communicates uses the gradients of its rank as they are.

    ZeroRedundancyOptimizer does: it sends only weights. Of torch's classes, only those with DTensors communicate within
    the update, and they are replayed by all ranks together.
    """
    if facts.get("why", "unknown") or facts["hooks"] or facts["close"] or not facts["of_torch"]:
        return False
    return all(in_noise(error, noise) <= limit() for _, error, noise, *_ in facts["parameters"])


def _steps_of_replicas(training: RecordedTraining) -> set[tuple[int, int]] | None:
    if training.world_size == 1:
        return None
    found: set[tuple[int, int]] = set()
    for steps in training.common_steps:
        weights = list(weights_at(steps))
        is_whole = all(len(step.parameters) == len(weights) for step in steps.values())
        if is_whole and not any(one.differ("before") for one in weights):
            found |= {(step.optimizer, step.number) for step in steps.values()}
    return found


def _by_turns(training: RecordedTraining) -> dict[Key, str]:
    whole, in_blocks, moved, still = set[Key](), set[Key](), set[Key](), set[Key]()
    for one in noted(training, OBSERVER):
        made = {int(row[0]): row[4] for row in one.facts["parameters"]}
        for number, known in near_replays(one).items():
            key = one.step.optimizer, one.parameter(number)
            if known.mistake in STILL:
                still.add(key)
            elif made[number]:
                moved.add(key)
            if known.mistake == BY_SHARD:
                in_blocks.add(key)
            elif known.moves_rightly:
                whole.add(key)
    return dict.fromkeys(whole & in_blocks, BY_TURNS) | dict.fromkeys(moved & still, AT_TIMES)


def _has_right_one_of_shape(one: ObserverFacts, name: str) -> bool:
    """Return whether another parameter of the same shape has the right update in the same step."""
    shapes = {each.name: each.shape for each in one.step.parameters}
    right = [one.parameter(number) for number, known in near_replays(one).items() if known.moves_rightly]
    return any(shapes.get(other) == shapes.get(name) for other in right)
