"""Notes how samplers order the data, epoch after epoch, and which loader the recorded batches come from."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, dataloader

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.document_layout import document_ends
from plumbline.check.rank.observers.row_hashes import digest, rows_of, tensors_in
from plumbline.check.rank.tensor_digest import tensor_digest
from plumbline.recording.module_calls import running_modules
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.patching import attempt, wrap
from plumbline.recording.pause import is_rehearsal
from plumbline.replay.memory import address_of

HEAD = 64
"""Number of indices at the beginning of an epoch that identify its order."""

BATCHES = 64
"""The most recent batches of which it is known where they come from: trainers fetch those of a step in advance."""

ENTRIES = 1024
"""The number of a tensor's first entries that identify it among recent batches."""

PASSES = 64
"""The most passes that are noted, of samplers and of loaders each."""


@dataclass(eq=False)
class _Pass:
    """A pass through a loader. ``version``: the watched parameter's version when the last batch was fetched."""

    facts: Facts
    has_begun: bool = False
    version: int | None = None


@dataclass(frozen=True, eq=False)
class _Batch:
    """A batch that a loader returned. ``prints`` identify its tensors also after they were copied."""

    facts: Facts
    tensors: Sequence[ref[Tensor]]
    prints: frozenset[str]

    def shared(self, tensors: Sequence[Tensor], prints: Collection[str]) -> int:
        """Return how many tensors are views of those of the batch, or equal to them."""
        places = {address_of(one) for each in self.tensors if (one := each()) is not None} - {0}
        return max(sum(address_of(one) in places for one in tensors), len(self.prints.intersection(prints)))


class LoaderObserver(Observer):
    """Notes each pass through a sampler: its settings, the head of its order, whether it was complete.

    ``steps`` counts the batches of a pass after which the optimizer stepped. While steps are recorded, the origin of
    recent batches is known. Passes are noted until the process ends, which costs about a microsecond a batch, and a
    small file an epoch. ``workers``: the number of a loader's processes if each of them iterates over the data set
    itself, else 0; ``repeated``: how many batches equal the batch of the same pass before it.
    """

    name = "loaders"

    def __init__(self) -> None:
        self._fetched: deque[_Batch] = deque(maxlen=BATCHES)
        self._samplers: list[Facts] = []
        self._passes: list[Facts] = []
        self._numbers: dict[str, WeakKeyDictionary[Any, int]] = {}
        self._unused = {kind: itertools.count() for kind in ("sampler", "loader")}
        self._iterators: WeakKeyDictionary[Any, _Pass] = WeakKeyDictionary()
        self._latest: dict[int, Facts] = {}
        self._count = 0
        self._write: Callable[[], None] = lambda: None
        self._has_changed = False
        self._watched: ref[Tensor] | None = None

    def install(self) -> None:
        """Wrap the methods of samplers and loaders that begin an epoch, and the one that fetches a batch."""
        wrap(DistributedSampler, "__iter__", self._around_sampler)
        wrap(RandomSampler, "__iter__", self._around_sampler)
        wrap(DataLoader, "__iter__", self._around_loader)
        # A private name: where a version of torch lacks it, batches have no known origin.
        wrap(getattr(dataloader, "_BaseDataLoaderIter", None), "__next__", self._around_fetch)

    def before_step(self, optimizer: Optimizer) -> None:
        """Choose a parameter whose version tells, later and without cost, whether the optimizer has stepped."""
        if self._watched is None:
            parameter = next((p for p in parameters_of(optimizer) if p.grad is not None), None)
            if parameter is not None:
                self._watched = ref(parameter)

    def stop(self) -> None:
        super().stop()
        self._fetched.clear()

    def origin_of(self, tensors: Sequence[Tensor]) -> Facts | None:
        """Return the batch of which a forward's tensors are parts; the latest one if that is not known."""
        if not self._fetched:
            return None
        prints = {one for one in map(_print, tensors) if one}
        shared = [batch.shared(tensors, prints) for batch in self._fetched]
        best = max(shared)
        is_known = best and shared.count(best) == 1  # masks may be the same in all batches
        return self._fetched[shared.index(best) if is_known else -1].facts

    def final_facts(self) -> Facts | None:
        return {"samplers": self._samplers, "loaders": self._passes}

    def after_recording(self, write: Callable[[], None]) -> None:
        self._write = write

    def _around_sampler(self, original: Callable[..., Any], sampler: Any) -> Iterator[Any]:
        # As lazy as the original, so that it draws from the global generator at the same time.
        noted = attempt(self._note_sampler, sampler, original)
        order: Iterator[Any] = original(sampler)
        return order if noted is None else self._followed(order, noted)

    def _followed(self, order: Iterator[Any], noted: Facts) -> Iterator[Any]:
        def head() -> Iterator[Any]:
            seen: list[int] = []
            for index in itertools.islice(order, HEAD):
                seen.append(index if isinstance(index, int) else attempt(_hash, index) or 0)
                noted["head"], noted["count"] = digest(seen), len(seen)
                yield index

        def end() -> Iterator[Any]:
            noted["complete"] = True
            return iter(())

        return itertools.chain(head(), order, _called(end))

    def _note_sampler(self, sampler: Any, original: Callable[..., Any]) -> Facts | None:
        if getattr(type(sampler).__iter__, "__wrapped__", None) is not original:
            return None  # a subclass makes another order of this one
        number = self._number("sampler", sampler)
        self._latest.pop(number, None)
        if len(self._samplers) >= PASSES:
            return None
        noted: Facts = {
            "sampler": number,
            "class": type(sampler).__name__,
            "distributed": isinstance(sampler, DistributedSampler),
            "torch": original.__module__.startswith("torch."),
            "gradients": torch.is_grad_enabled(),
            "complete": False,
            "steps": 0,
            "head": "",
            "count": 0,
        }
        for name in ("epoch", "seed", "rank", "num_replicas", "shuffle", "replacement", "num_samples"):
            value = getattr(sampler, name, None)
            if isinstance(value, (int, bool)):
                noted[name] = value
        source: Any = getattr(sampler, "dataset", getattr(sampler, "data_source", None))
        noted["length"] = len(source) if hasattr(source, "__len__") else None
        self._samplers.append(noted)
        self._latest[number] = noted
        return noted

    def _around_loader(self, original: Callable[..., Any], loader: Any) -> Any:
        attempt(self._follow_own_samplers, loader)
        iterator = original(loader)
        attempt(self._note_pass, loader, iterator)
        return iterator

    def _follow_own_samplers(self, loader: Any) -> None:
        """Wrap ``__iter__`` of the script's own samplers if their order depends on the epoch."""
        for sampler in _samplers_of(loader):
            kind = type(sampler)
            known = isinstance(sampler, RandomSampler) or hasattr(kind.__iter__, "__wrapped__")
            if not known and callable(getattr(sampler, "set_epoch", None)) and isinstance(sampler, Sampler):
                wrap(kind, "__iter__", self._around_sampler)

    def _note_pass(self, loader: Any, iterator: Any) -> None:
        self._write_changes()  # of a pass that was broken off
        noted = {
            "loader": self._number("loader", loader),
            "pass": self._count,
            "batch_size": loader.batch_size if isinstance(loader.batch_size, int) else None,
            "length": attempt(len, loader),
            "sampler": self._sampler_of(loader),
            "batches": 0,
            "workers": loader.num_workers if isinstance(loader.dataset, IterableDataset) else 0,
            "repeated": 0,
        }
        self._count += 1
        if len(self._passes) < PASSES:
            self._passes.append(noted)
        self._iterators[iterator] = _Pass(noted)

    def _around_fetch(self, original: Callable[..., Any], iterator: Any) -> Any:
        try:
            batch = original(iterator)
        except StopIteration:
            attempt(self._note_step, iterator)
            attempt(self._write_changes)
            raise
        attempt(self._note_step, iterator)
        if self.recording:
            attempt(self._note_batch, iterator, batch)
        return batch

    def _note_step(self, iterator: Any) -> None:
        one, version = self._iterators.get(iterator), self._version()
        if one is None:
            return
        latest = self._latest.get(one.facts["sampler"])
        if latest is not None and one.has_begun and version not in (None, one.version):
            latest["steps"] += 1
            self._has_changed = True
        one.has_begun, one.version = True, version

    def _write_changes(self) -> None:
        if self._has_changed:
            self._has_changed = False
            self._write()

    def _note_batch(self, iterator: Any, batch: Any) -> None:
        one = self._iterators.get(iterator)
        if one is not None:
            one.facts["batches"] += 1
            facts = {name: one.facts[name] for name in ("loader", "pass", "sampler")} | {"batch": one.facts["batches"]}
            tensors = list(tensors_in(batch))
            prints = frozenset(one for one in map(_print, tensors) if one)
            before = next((each for each in reversed(self._fetched) if each.facts["pass"] == facts["pass"]), None)
            one.facts["repeated"] += bool(prints) and before is not None and before.prints == prints
            self._fetched.append(_Batch(facts, [*map(ref, tensors)], prints))

    def _sampler_of(self, loader: Any) -> int | None:
        """Return the number of the innermost sampler that a loader draws from, if it is one of those followed."""
        followed = (one for one in _samplers_of(loader) if hasattr(type(one).__iter__, "__wrapped__"))
        innermost = next(reversed(list(followed)), None)
        return None if innermost is None else self._number("sampler", innermost)

    def _number(self, kind: str, thing: Any) -> int:
        known = self._numbers.setdefault(kind, WeakKeyDictionary())
        if thing not in known:
            known[thing] = next(self._unused[kind])  # not the length: freed objects had their own numbers
        return known[thing]

    def _version(self) -> int | None:
        """Return how often the watched parameter was written to: every optimizer step writes to it."""
        parameter = self._watched() if self._watched is not None else None
        return None if parameter is None else int(parameter._version)


def _samplers_of(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a loader, from the outermost, such as a batch sampler, to the innermost."""
    sampler = loader
    for _ in range(8):
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)
        if sampler is None:
            return
        yield sampler


def _hash(index: Any) -> int:
    return hash(tuple(index) if isinstance(index, list) else index)


def _print(tensor: Tensor) -> str:
    """Return a digest of the shape and the first entries of a tensor, "" if it cannot be read."""
    if not address_of(tensor) or not tensor.numel():
        return ""
    return f"{tuple(tensor.shape)} {tensor_digest(tensor.detach().reshape(-1)[:ENTRIES])}"


def _called(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Return an iterator that calls ``make`` when it is reached, not before."""
    yield from make()


class BatchObserver(Observer):
    """Notes, for each backward pass, the forwards since the one before it: ``{"forwards": [...]}``.

    A forward also has what ``rows_of`` returns, if it is given tensors. ``number`` counts forwards, as the numbers of
    tracked calls do. ``module`` numbers the outermost modules in the order of their first calls. ``is_inner``: another
    one runs, and may only wrap this one. ``fetched`` is the loader's batch, None without a loader.
    """

    name = "batches"

    def __init__(self, loaders: LoaderObserver) -> None:
        self._loaders = loaders
        self._modules: list[nn.Module] = []
        self._forwards: list[Facts] = []
        self._number = 0

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._number += 1
        if is_rehearsal():
            return
        if not any(known is module for known in self._modules):
            self._modules.append(module)
        place = next(i for i, known in enumerate(self._modules) if known is module)
        self._forwards.append(
            {
                "number": self._number,
                "module": place,
                "is_inner": bool(running_modules()),
                "class": type(module).__name__,
                "training": module.training,
                "fetched": self._loaders.origin_of(list(tensors_in((args, kwargs)))),
                **(rows_of(args, kwargs, lambda: document_ends(module, args, kwargs)) or {}),
            }
        )

    def backward_ends(self, number: int) -> Facts | None:
        forwards, self._forwards = self._forwards, []
        return {"forwards": forwards} if forwards else None

    def stop(self) -> None:
        self._modules, self._forwards = [], []
