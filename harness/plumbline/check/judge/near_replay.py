"""What is known of an update that has to be near to a replay in its own precision, and which mistake it is like.

An optimizer that computes in 16 bits, as Muon does, rounds so much that its distance from a replay in float64 would
hide many mistakes. It repeats its own roundings, however. The update is right if it is as near to a replay in its own
precision as one more rounding of the gradient explains, and wrong if it is what a known mistake makes of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plumbline.check.judge.noted import ObserverFacts
from plumbline.judge.oracle.noise import in_noise, limit

ALIKE = 1e-3
"""How near an update is to what a mistake makes of the parameter, as a part of what the mistake changes.

Chosen: an update is known to three digits from rounded weights. One that is like no known mistake is not called wrong
by this.
"""

LARGE = 0.1
"""How much a step by shards has to change of an update, at least, to be called wrong.

Chosen: it withholds an accusation where a state is quantised in blocks, which begin anew in each shard.
"""

_SCALED = "scaled "

STILL = ("still", "decay-only")
"""Steps that do not move a parameter, or let it decay alone."""

BY_SHARD, ADDED = "by-shard", "added"
"""The step of each shard alone, and that with the sum of the ranks' gradients in the place of their mean."""


@dataclass(frozen=True)
class NearReplay:
    """Distances of one update: from the nearest replay, how large rounding may make that, and from mistakes.

    ``others`` has two distances for each mistake: from what it makes of the parameter, and of that from the right one.
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
        """Whether it repeats a replay, or differs by a rounding that could hide no known mistake."""
        return self.nearest == 0 or (self.x_tight <= limit() and not self.could_hide)

    @property
    def is_added(self) -> bool:
        """Whether the step adds up gradients of the ranks, where their mean makes another update.

        That is right if the loss is divided by the number of ranks.
        """
        return ADDED in self.others and in_noise(self.others[ADDED][0], self.tight) <= limit() < self.x_tight

    @property
    def as_added(self) -> NearReplay:
        """The same for a training in which the sum is right."""
        return replace(self, nearest=self.others[ADDED][0], others={})

    @property
    def moves_rightly(self) -> bool:
        """Whether it is right, and not to move the parameter would have been wrong."""
        return self.is_right and self.others.get("still", (0.0, 0.0))[1] > limit() * self.tight

    @property
    def could_hide(self) -> bool:
        """Whether rounding could hide a step that nobody takes, that all ranks add up, or that each shard has alone."""
        apart = [self._material.get(name, (0.0, 0.0))[1] for name in ("still", "summed", BY_SHARD)]
        return any(0 < one <= 2 * limit() * self.tight for one in apart)

    @property
    def mistake(self) -> str:
        """The known mistake that the update is like, "" if it is right or like none."""
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
        """The mistakes that change the update, and of steps by shards only those that change much of it."""
        least = {BY_SHARD: LARGE * self.others.get("still", (0.0, 0.0))[1]}
        return {name: (far, apart) for name, (far, apart) in self.others.items() if apart > least.get(name, 0.0)}

    @property
    def factor(self) -> str | None:
        """The factor of an update, without weight decay, that is right but for it."""
        return self.mistake.removeprefix(_SCALED) if self.mistake.startswith(_SCALED) else None

    @property
    def decays(self) -> bool:
        """Whether weight decay is a part of the update."""
        return "decay-lost" in self.others

    @property
    def noise(self) -> float:
        """What the distance is counted in: nothing explains it if the update repeats a mistake bit for bit."""
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
    """Return what is known of the updates of a step, by the numbers of their parameters."""
    found = {}
    for number, known in one.facts.get("close", {}).items():
        others = {name: (far, apart) for name, (far, apart) in known["others"].items()}
        found[int(number)] = NearReplay(known["nearest"], known["tight"], others)
    return found
