"""Helpers that adapters share: imports of the libraries under test, and pieces of training loops."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from plumbline.core.errors import SubjectError


@contextmanager
def installed_by(command: str) -> Iterator[None]:
    """Import a library in this context. If that fails, the error names the ``command`` that installs it."""
    try:
        yield
    except ImportError as error:
        raise SubjectError(
            f"its library cannot be imported in this environment ({error}): run `{command}`, or choose an interpreter "
            'that has it with --subject "…;python=/path/to/python"'
        ) from error


@contextmanager
def stand_ins(unused: Mapping[str, str]) -> Iterator[None]:
    """Import a library in this context, with empty modules in place of those that are not installed.

    ``unused`` maps each module to the module that shows whether it is installed. The empty modules are removed
    afterwards, so that no one else imports them.
    """
    finder = _Finder(tuple(name for name, needed in unused.items() if not _is_installed(needed)))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class _StandIn(ModuleType):
    """A module from which any name can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {"__module__": self.__name__})


class _Nothing:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments, because libraries can create objects when they are imported."""


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def windows(loader: Any, accumulate: int) -> Iterator[tuple[int, Any, int, bool]]:
    """Yield the number of each batch of an epoch, the batch, the size of its window, and whether it is the last there.

    A window is the batches of one step. The last window of an epoch can be shorter than ``accumulate``.
    """
    for number, batch in enumerate(loader):
        first = number - number % accumulate
        size = min(accumulate, len(loader) - first)
        yield number, batch, size, number + 1 == first + size


def ddp_options(job: Any) -> dict[str, bool]:
    """Return options for libraries that wrap the model in DistributedDataParallel if there are several ranks."""
    return {"find_unused_parameters": job.unused_parameters} if job.world_size > 1 else {}


def weighted(loss: Tensor, batch: Any) -> Tensor:
    """Return ``[loss × samples, samples]`` of a batch. Divide their sums for the mean over samples."""
    count = len(batch["index"])
    return torch.stack(
        [loss.detach().double() * count, torch.tensor(float(count), dtype=torch.float64).to(loss.device)]
    )
