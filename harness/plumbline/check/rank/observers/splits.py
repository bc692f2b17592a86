"""Notes the samples in a loader's batches, and gives ranks and micro-batches other samples if asked to."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn import functional
from torch.utils.data import dataloader

from plumbline.check.evidence.options import Deal
from plumbline.check.evidence.training import Facts
from plumbline.recording.observer import Observer
from plumbline.recording.patching import wrap
from plumbline.recording.process import rank_and_world

MOST_BATCHES = 256
"""The most batches of an iterator whose samples are noted."""

_DROPOUTS = {
    "alpha_dropout": "p", "dropout": "p", "dropout1d": "p", "dropout2d": "p", "dropout3d": "p",
    "feature_alpha_dropout": "p", "scaled_dot_product_attention": "dropout_p",
}  # fmt: skip
_PLACES = {"p": 1, "dropout_p": 4}


class SplitObserver(Observer):
    """Notes the samples of the loader iterator that gave the first recorded forward its batch.

    Facts of the process: ``iterator``, its number in the order in which iterators began; ``batches``, the numbers of
    the samples in its first batches, None if samples have no numbers; ``dropouts``, how often a function would have
    dropped something.
    """

    name = "splits"

    def __init__(self, deal: Deal, *, without_dropout: bool) -> None:
        self._deal = deal
        self._without_dropout = without_dropout
        self._drawn: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._latest: Any = None
        self._used: int | None = None
        self._batches: list[Any] = []
        self._dropouts = 0

    def install(self) -> None:
        # Private names: where a version of torch lacks them, there are no facts.
        iterator = getattr(dataloader, "_BaseDataLoaderIter", None)
        wrap(iterator, "_next_index", self._around_index)
        wrap(iterator, "__next__", self._around_fetch)
        if self._without_dropout:
            for name in _DROPOUTS:
                wrap(functional, name, self._around_dropout)

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._used is None and self._latest is not None:
            self._used, self._batches = self._numbers[self._latest], self._drawn[self._latest]

    def final_facts(self) -> Facts:
        batches = [one for one in self._batches[:MOST_BATCHES] if _is_numbered(one)]
        known = len(batches) == min(len(self._batches), MOST_BATCHES)
        return {
            "iterator": self._used,
            "batches": [[int(number) for number in one] for one in batches] if known else None,
            "dropouts": self._dropouts,
        }

    def _around_index(self, original: Callable[..., Any], iterator: Any) -> Any:
        index = original(iterator)
        number = self._numbers.setdefault(iterator, len(self._numbers))
        drawn = self._drawn.setdefault(iterator, [])
        chosen, batches = self._deal.get(_rank(), (None, []))
        if number == chosen and len(drawn) < len(batches):
            index = batches[len(drawn)]
        if len(drawn) < MOST_BATCHES:
            drawn.append(index)
        return index

    def _around_fetch(self, original: Callable[..., Any], iterator: Any) -> Any:
        batch = original(iterator)
        if iterator in self._numbers:
            self._latest = iterator
        return batch

    def _around_dropout(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = _DROPOUTS[original.__name__]
        place = _PLACES[name]
        share = kwargs.get(name, args[place] if len(args) > place else 0.5 if name == "p" else 0.0)
        if share:
            self._dropouts += 1
            args, kwargs = args[:place] + ((0.0, *args[place + 1 :]) if len(args) > place else ()), dict(kwargs)
            if len(args) <= place:
                kwargs[name] = 0.0
        return original(*args, **kwargs)


def _rank() -> int:
    known = rank_and_world()
    return known[0] if known is not None else int(os.environ.get("RANK", "0"))


def _is_numbered(batch: Any) -> bool:
    return isinstance(batch, (list, tuple)) and all(isinstance(one, int) for one in batch)
