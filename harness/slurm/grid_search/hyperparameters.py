"""Hyper-parameters with several options each, and the trials that they make."""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

from harness.core.errors import PlumblineError


class SearchError(PlumblineError):
    """A search cannot be done as it was asked for."""


class Hyperparameters(argparse.Namespace):
    """Parsed arguments, as of argparse; ``trials`` says which others are to be tried."""

    def __init__(self, values: argparse.Namespace, options: dict[str, tuple[Any, ...]], search: str, seed: int) -> None:
        super().__init__(**vars(values))
        self._search = (options, search, seed)

    def trials(self, nb_trials: int | None = None) -> list[dict[str, Any]]:
        """Return what each trial sets, at most ``nb_trials`` of them (None: all), without repeats.

        ``grid_search`` goes through the options in the order in which they were added, the last one fastest;
        ``random_search`` draws, with the parser's seed: the same trials every time.

        Raises:
            SearchError: nothing is tunable, or ``nb_trials`` is less than one.
        """
        options, search, seed = self._search
        if not options:
            raise SearchError("there is nothing to search: add arguments with opt_list(…, options=[…], tunable=True)")
        if nb_trials is not None and nb_trials < 1:
            raise SearchError(f"nb_trials={nb_trials}: at least one trial is needed")
        every = math.prod(map(len, options.values()))
        wanted = every if nb_trials is None else min(nb_trials, every)
        if search == "grid_search":
            chosen: Iterable[tuple[Any, ...]] = itertools.islice(itertools.product(*options.values()), wanted)
        else:
            places = random.Random(seed).sample(range(every), wanted)
            chosen = (_combination(place, list(options.values())) for place in places)
        return [dict(zip(options, values, strict=True)) for values in chosen]

    def trial(self, values: dict[str, Any]) -> argparse.Namespace:
        """Return the arguments of one trial."""
        plain = {name: value for name, value in vars(self).items() if name != "_search"}
        return argparse.Namespace(**{**plain, **values})


class HyperOptArgumentParser(argparse.ArgumentParser):
    """An argparse parser whose arguments can have several options to try.

    Args:
        strategy: ``"grid_search"`` or ``"random_search"``.
        seed: of a random search.
        settings: argparse's own.

    Raises:
        SearchError: there is no such strategy.
    """

    def __init__(self, strategy: str = "grid_search", seed: int = 0, **settings: Any) -> None:
        if strategy not in ("grid_search", "random_search"):
            raise SearchError(f"there is no strategy {strategy!r}: take 'grid_search' or 'random_search'")
        super().__init__(**settings)
        self._strategy, self._seed = strategy, seed
        self._options: dict[str, tuple[Any, ...]] = {}

    def opt_list(self, *names: str, options: Sequence[Any], tunable: bool = True, **settings: Any) -> None:
        """Add an argument; if it is ``tunable``, each of its ``options`` is tried.

        Raises:
            SearchError: it is tunable and has no options, or one twice.
        """
        action = self.add_argument(*names, **settings)
        if not tunable:
            return
        if not options or len(set(map(repr, options))) < len(options):
            raise SearchError(f"{names[0]} needs options that differ, not {list(options)}")
        self._options[action.dest] = tuple(options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments, as argparse does, with the trials that they make."""
        return Hyperparameters(super().parse_args(args, namespace), dict(self._options), self._strategy, self._seed)


def _combination(place: int, options: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what stands at a place of the grid, which may be too large to be walked through."""
    found: list[Any] = []
    for choices in reversed(options):
        place, index = divmod(place, len(choices))
        found.insert(0, choices[index])
    return tuple(found)
