"""Checks of a workload's weights and data, and a fingerprint that is the same in every process."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from plumbline.core.errors import WorkloadError
from plumbline.own_workloads.load import calling
from plumbline.workloads import Columns, Workload

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
    """Return the training data of ``workload`` for ``devices`` devices."""
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
