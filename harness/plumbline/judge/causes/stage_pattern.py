"""What is wrong with each rank's part of a gradient, if several ranks hold one model together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import factor_between
from plumbline.judge.oracle.noise import norm


@dataclass(frozen=True)
class HeldParameters:
    """Which ranks hold the parameters of one model.

    ``holders`` has the ranks that hold each parameter, in order.
    """

    holders: Mapping[str, tuple[int, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for ranks in self.holders.values() for rank in ranks}))

    def on(self, rank: int) -> set[str]:
        return {name for name, ranks in self.holders.items() if rank in ranks}

    def first_on(self, rank: int) -> set[str]:
        """Return the parameters whose first holder is this rank: the judge reads these from its record."""
        return {name for name, ranks in self.holders.items() if ranks[0] == rank}

    def only_on(self, rank: int) -> set[str]:
        return {name for name, ranks in self.holders.items() if ranks == (rank,)}

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        return {name: ranks for name, ranks in self.holders.items() if len(ranks) > 1}


@dataclass(frozen=True)
class StagePattern:
    """What the wrong gradients of all steps have in common, stage by stage.

    ``wrong_ranks`` hold the parameters ``wrong``, whose gradients are wrong. ``factors`` has the number that multiplies
    each rank's right gradients, and ``factors_by_step`` those of single steps, without repetition. ``ranks`` are all
    ranks that hold parameters.
    """

    ranks: tuple[int, ...] = ()
    wrong_ranks: tuple[int, ...] = ()
    wrong: tuple[str, ...] = ()
    factors: Mapping[int, float] = field(default_factory=dict)
    factors_by_step: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def in_part(self) -> bool:
        return 0 < len(self.wrong_ranks) < len(self.ranks)

    @property
    def figures(self) -> dict[str, object]:
        """The values for the placeholders in a hypothesis's texts."""
        return {
            "stages": len(self.ranks),
            "wrong_ranks": ranks_in_words(self.wrong_ranks),
            "held": names_in_words(self.wrong),
            "stage_factors": _listed(
                [f"{self._factors_on(ranks[0])} × the right ones on {ranks_in_words(ranks)}" for ranks in self._alike()]
            ),
        }

    def _alike(self) -> Iterable[list[int]]:
        wrong = [rank for rank in self.wrong_ranks if rank in self.factors]
        return (list(ranks) for _, ranks in groupby(wrong, key=self._factors_on))

    def _factors_on(self, rank: int) -> str:
        found = self.factors_by_step[rank]
        return " or ".join(found) if len(found) < 3 else f"{found[0]} to {found[-1]}"


def stage_pattern(
    held: HeldParameters, wrong: Iterable[str], gradients: Sequence[tuple[Tensors, Tensors]]
) -> StagePattern:
    """Return the pattern of ``gradients``, pairs of right and observed ones; the tensors ``wrong`` are wrong."""
    names = [name for name in held.holders if name in set(wrong)]
    factors, by_step = {}, {}
    for rank in held.ranks:
        own = held.only_on(rank) or held.first_on(rank)
        pairs = [({n: right[n] for n in own if n in right}, observed) for right, observed in gradients]
        found = [factor_between(right, observed) for right, observed in pairs if any(map(norm, right.values()))]
        if found:
            factors[rank] = statistics.median(found)
            by_step[rank] = tuple(dict.fromkeys(f"{factor:.4g}" for factor in sorted(found)))
    ranks = {held.holders[name][0] for name in names}
    return StagePattern(held.ranks, tuple(sorted(ranks)), tuple(names), factors, by_step)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, or ``ranks 0, 1 and 2``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed([str(rank) for rank in ranks])}"


def names_in_words(names: Sequence[str]) -> str:
    """Return the first two names and how many more there are, or all of three."""
    return _listed(list(names) if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"])


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
