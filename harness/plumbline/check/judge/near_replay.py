"""Compares an update with replays in its own precision, and with what known mistakes make of the parameter.

A replay computes the update again from the recorded weights, gradients and state. An optimizer that computes in 16
bits, as Muon does, rounds so much that its distance from a replay in float64 would hide many mistakes. However, it
repeats its own roundings. The update is right if its distance from a replay in its own precision is at most what one
more rounding of the gradient explains. It is wrong if it matches a known mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plumbline.check.judge.noted import ObserverFacts
from plumbline.judge.oracle.noise import in_noise, limit

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
        """Whether weight decay is a part of the update."""
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
