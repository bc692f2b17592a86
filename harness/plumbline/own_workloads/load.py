"""Loads the workloads behind ``--workload``: a file or a module, optionally followed by ``::`` and a name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from plumbline.core.cell import Cell
from plumbline.core.errors import PlumblineError, SubjectError, WorkloadError
from plumbline.user_code.user_module import import_file, import_module, imported_file, sha256_of
from plumbline.user_code.user_traceback import headline, user_traceback
from plumbline.workloads import EVERY, WORKLOADS, PerformanceWorkload, Workload, find


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Convert an exception in the user's code to an error that begins with ``what``, the call that raised it."""
    try:
        yield
    except PlumblineError:
        raise
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"{what} raises {headline(error)}\n{user_traceback(error)}") from error


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class OwnWorkload:
    """One of the user's own workloads: its name, what the user typed, and the hash of its source."""

    name: str
    locator: str
    sha256: str


def use_workloads(locators: Sequence[str]) -> tuple[OwnWorkload, ...]:
    """Load the workloads behind ``locators`` and register them in place of those loaded before."""
    for name in [name for name, workload in WORKLOADS.items() if workload.locator is not None]:
        del WORKLOADS[name]
    found: list[OwnWorkload] = []
    for locator in locators:
        for workload, module in _load(locator):
            _refuse_namesake(workload, locator, found)
            WORKLOADS[workload.name] = workload
            found.append(OwnWorkload(workload.name, locator, sha256_of(module)))
    return tuple(found)


def load_workload(locator: str) -> Workload:
    """Return the workload behind a locator that names exactly one."""
    ((workload, _),) = _load(locator)
    return workload


def _refuse_namesake(workload: Workload, locator: str, found: list[OwnWorkload]) -> None:
    taken = EVERY.get(workload.name)
    if taken is None or type(taken) is type(workload):  # the file registers it itself
        return
    owner = next((own.locator for own in found if own.name == workload.name), None)
    taken_by = "a built-in workload" if owner is None else f"a workload of {owner}"
    raise WorkloadError(
        f"--workload {locator}: {workload.name!r} is already the name of {taken_by}; choose another name"
    )


def _load(locator: str) -> list[tuple[Workload, ModuleType]]:
    place, _, wanted = locator.partition("::")
    try:
        module = _module(place)
        found = [_made(kind, module, place) for kind in _classes(module)]
        if not found:
            raise WorkloadError(
                f"{place} has no workload: define a subclass of plumbline.workloads.Workload with a name "
                "(`plumbline new-workload FILE.py` writes an example)"
            )
        chosen = [workload for workload in found if wanted in ("", workload.name)]
        if not chosen:
            raise WorkloadError(f"{place} has no workload {wanted!r}; it has {', '.join(one.name for one in found)}")
    except (SubjectError, WorkloadError) as error:
        raise WorkloadError(f"--workload {locator}: {error}") from error
    return [(workload, module) for workload in chosen]


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return import_module(place)
    # A file that also has trainers can be imported already. Importing it twice would register its contents twice.
    return imported_file(Path(place).resolve()) or import_file(Path(place), "workload")


def _classes(module: ModuleType) -> list[type[Workload]]:
    every = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Workload) and not value.__module__.startswith("plumbline.")
    ]
    # Classes imported from elsewhere count as base classes, unless the file defines no workload class itself.
    own = [kind for kind in every if kind.__module__ == module.__name__] or every
    return [kind for kind in dict.fromkeys(own) if hasattr(kind, "name")]


def _made(kind: type[Workload], module: ModuleType, place: str) -> Workload:
    if issubclass(kind, PerformanceWorkload):
        raise WorkloadError(f"{kind.__name__} is a PerformanceWorkload: --workload does not support timed workloads")
    with calling(f"{kind.__name__}()"):
        workload = kind()
    if not isinstance(workload.name, str) or not _NAME.fullmatch(workload.name):
        raise WorkloadError(
            f"{kind.__name__}.name is {workload.name!r}: use only letters, digits and . _ + -, because it names files"
        )
    absolute = str(Path(place).resolve()) if place.endswith(".py") else place
    workload.locator = f"{absolute}::{workload.name}"
    return workload


def workload_of(cell: Cell) -> Workload:
    """Return the workload of ``cell``, with the cell's seed."""
    known = EVERY.get(cell.workload)
    if cell.workload_locator is not None and (known is None or known.locator != cell.workload_locator):
        WORKLOADS[cell.workload] = load_workload(cell.workload_locator)
    return find(cell.workload, cell.seed)
