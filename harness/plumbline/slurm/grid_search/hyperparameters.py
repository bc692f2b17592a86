"""Hyper-parameters with several options each, and the trials of a search over them."""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

from plumbline.core.errors import PlumblineError


class SearchError(PlumblineError):
    """A search is not possible with these arguments."""


class Hyperparameters(argparse.Namespace):
    """Parsed arguments, as argparse returns them, with the trials of a search."""

    def __init__(self, values: argparse.Namespace, options: dict[str, tuple[Any, ...]], search: str, seed: int) -> None:
        super().__init__(**vars(values))
        self._search = (options, search, seed)

    def trials(self, nb_trials: int | None = None) -> list[dict[str, Any]]:
        """Return the tunable arguments of each trial, at most ``nb_trials`` of them (None: all), without duplicates.

        ``grid_search`` iterates over the options in the order in which the arguments were added, the last one fastest;
        ``random_search`` samples with the parser's seed.

        Raises:
            SearchError: no argument is tunable, or ``nb_trials`` is less than one.
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
        plain = {name: value for name, value in vars(self).items() if name != "_search"}
        return argparse.Namespace(**{**plain, **values})


class HyperOptArgumentParser(argparse.ArgumentParser):
    """An argparse parser whose arguments can have several options to try.

    Args:
        strategy: ``"grid_search"`` or ``"random_search"``.
        seed: the seed of a random search.
        settings: those of ``argparse.ArgumentParser``.

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
    """Return the options at an index of the grid, which may be too large to iterate over."""
    found: list[Any] = []
    for choices in reversed(options):
        place, index = divmod(place, len(choices))
        found.insert(0, choices[index])
    return tuple(found)
