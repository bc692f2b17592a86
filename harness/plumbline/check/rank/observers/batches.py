"""Notes the rows of each batch that a training forward is given, and which loader it comes from."""

from __future__ import annotations

from typing import Any

from torch import nn

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.document_layout import document_ends
from plumbline.check.rank.observers.loaders import LoaderObserver
from plumbline.check.rank.observers.row_hashes import rows_of, tensors_in
from plumbline.recording.observer import Observer
from plumbline.recording.rehearsal import is_rehearsal
from plumbline.recording.running_modules import running_modules


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
        """Hash the rows of the inputs."""
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
