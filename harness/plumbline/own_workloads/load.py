"""Loads the workloads behind ``--workload``: a file or a module, optionally followed by ``::`` and a name.

A fingerprint of a workload's weights and data is the same in every process.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from plumbline.core.cell import Cell
from plumbline.core.errors import PlumblineError, SubjectError, WorkloadError
from plumbline.user_code import (
    headline,
    import_file,
    import_module,
    imported_file,
    sha256_of,
    user_traceback,
)
from plumbline.workloads import EVERY, WORKLOADS, Columns, PerformanceWorkload, Workload, find


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


_AT_RANDOM = (
    "use torch's default generator in build(), which is seeded, and the given generator in columns(); do not depend on "
    "the order of a set of strings, which differs between processes"
)


def check_model(workload: Workload) -> nn.Module:
    with calling("build()"):
        model = workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"build() returned {type(model).__name__}: return a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError("build() returned a model without trainable parameters")
    with calling("build()"):
        again = workload.model()
    _refuse_difference(model.state_dict(), again.state_dict(), f"build() is not deterministic: {_AT_RANDOM}")
    with calling("build()"):
        wide = workload.model(torch.float64)
    for name, value in wide.named_parameters():
        if value.dtype is not torch.float64:
            raise WorkloadError(f"parameter {name} of model(torch.float64) is {value.dtype}: cast it to float64")
    return model


def check_data(workload: Workload, devices: int) -> Columns:
    size = workload.global_batch_size(devices)
    if size % devices:
        raise WorkloadError(f"global_batch_size({devices}) is {size}, which is not divisible by {devices}")
    _check_drawn(workload)
    made: list[Columns] = []
    for name in ("dataset", "val_dataset"):
        with calling(f"{name}({devices})"):
            data = getattr(workload, name)(devices)
        _check_columns(data, name)
        with calling(f"{name}({devices})"):
            again = getattr(workload, name)(devices)
        _refuse_difference(data.columns, again.columns, f"{name}({devices}) is not deterministic: {_AT_RANDOM}")
        made.append(data)
    data = made[0]
    if len(data) < size:
        raise WorkloadError(f"dataset({devices}) has {len(data)} samples, fewer than the {size} of one global batch")
    if -(-len(data) // size) != workload.steps_per_epoch:
        raise WorkloadError(
            f"dataset({devices}) has {len(data)} samples, or {-(-len(data) // size)} batches of {size}, but "
            f"steps_per_epoch is {workload.steps_per_epoch}: make them agree"
        )
    return data


def _check_drawn(workload: Workload) -> None:
    if type(workload).columns is Workload.columns:
        return
    with calling("columns(4, generator)"):
        drawn: object = workload.columns(4, torch.Generator())
    if not isinstance(drawn, dict) or not drawn:
        raise WorkloadError(f"columns() returned {type(drawn).__name__}: return a dict of tensors")
    for name, values in drawn.items():
        if not isinstance(values, Tensor) or not values.dim():
            what = "a tensor without dimensions" if isinstance(values, Tensor) else type(values).__name__
            raise WorkloadError(f"columns() returned {what} as {name!r}: return a tensor with a row for each sample")


def _check_columns(data: object, name: str) -> None:
    if not isinstance(data, Columns):
        raise WorkloadError(
            f"{name}() returned {type(data).__name__}: return plumbline.workloads.Columns, a dict of tensors with a "
            'row for each sample, whose "index" shows which samples a rank uses'
        )
    index = data.columns.get("index")
    if index is None or not torch.equal(index, torch.arange(len(data))):
        raise WorkloadError(f'the "index" of {name}() must count the samples from 0: let Columns add that column')
    for column, values in data.columns.items():
        if len(values) != len(data):
            raise WorkloadError(f"{name}(): column {column!r} has {len(values)} rows for {len(data)} samples")


def content_of(workload: Workload) -> str:
    """Return a fingerprint of the weights and data, which depends on every bit of them."""
    found = {
        **workload.model().state_dict(),
        **{f"dataset {name}": column for name, column in workload.dataset(2).columns.items()},
        **{f"val_dataset {name}": column for name, column in workload.val_dataset(2).columns.items()},
    }
    digest = hashlib.sha256()
    for name, value in sorted(found.items()):
        values = value.detach().contiguous()
        digest.update(f"{name} {values.dtype} {[*values.shape]}\n".encode())
        digest.update(ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()))
    return digest.hexdigest()


def _refuse_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], why: str) -> None:
    for name in one:
        if name not in other or not _same(one[name], other[name]):
            raise WorkloadError(f"{name} differs between two calls with the same seed: {why}")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
