"""A workload's weights and data: what they must be, and a fingerprint of them that is the same in every process."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from plumbline.core.errors import WorkloadError
from plumbline.own_workloads.attempt import attempt
from plumbline.workloads import Columns, Workload

_AT_RANDOM = (
    "draw from torch's default generator in build(), which is seeded, and from the generator in columns(); "
    "the order of a set of strings differs in each process too"
)


def check_model(workload: Workload) -> nn.Module:
    with attempt("build()"):
        model = workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"build() returns {type(model).__name__}: it must be a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError("build() returns a model without a parameter to train")
    with attempt("build()"):
        again = workload.model()
    _refuse_difference(model.state_dict(), again.state_dict(), f"build() is not deterministic: {_AT_RANDOM}")
    with attempt("build()"):
        wide = workload.model(torch.float64)
    for name, value in wide.named_parameters():
        if value.dtype is not torch.float64:
            raise WorkloadError(f"model(torch.float64) has parameter {name} in {value.dtype}: cast it")
    return model


def check_data(workload: Workload, devices: int) -> Columns:
    """Return the training data of ``workload`` on so many ``devices``.

    Raises:
        WorkloadError: it has no whole batch, its samples have no index, or it differs from call to call.
    """
    size = workload.global_batch_size(devices)
    if size % devices:
        raise WorkloadError(f"global_batch_size({devices}) is {size}, which {devices} devices cannot share equally")
    _check_drawn(workload)
    made: list[Columns] = []
    for name in ("dataset", "val_dataset"):
        with attempt(f"{name}({devices})"):
            data = getattr(workload, name)(devices)
        _check_columns(data, name)
        with attempt(f"{name}({devices})"):
            again = getattr(workload, name)(devices)
        _refuse_difference(data.columns, again.columns, f"{name}({devices}) is not deterministic: {_AT_RANDOM}")
        made.append(data)
    data = made[0]
    if len(data) < size:
        raise WorkloadError(f"dataset({devices}) has {len(data)} samples, fewer than the {size} of one global batch")
    if -(-len(data) // size) != workload.steps_per_epoch:
        raise WorkloadError(
            f"dataset({devices}) has {len(data)} samples, which are {-(-len(data) // size)} batches of {size}, and "
            f"steps_per_epoch is {workload.steps_per_epoch}: a trainer would be called wrong for its number of steps"
        )
    return data


def _check_drawn(workload: Workload) -> None:
    if type(workload).columns is Workload.columns:
        return
    with attempt("columns(4, generator)"):
        drawn: object = workload.columns(4, torch.Generator())
    if not isinstance(drawn, dict) or not drawn:
        raise WorkloadError(f"columns() returns {type(drawn).__name__}: it must be a dict of tensors")
    for name, values in drawn.items():
        if not isinstance(values, Tensor) or not values.dim():
            what = "a tensor without dimensions" if isinstance(values, Tensor) else type(values).__name__
            raise WorkloadError(f"columns() returns {what} as {name!r}: it must be a tensor with a row for each sample")


def _check_columns(data: object, name: str) -> None:
    if not isinstance(data, Columns):
        raise WorkloadError(
            f"{name}() returns {type(data).__name__}: it must be plumbline.workloads.Columns, a dict of tensors with a "
            'row for each sample, whose "index" tells which samples a rank uses'
        )
    index = data.columns.get("index")
    if index is None or not torch.equal(index, torch.arange(len(data))):
        raise WorkloadError(f'{name}() has no "index" that counts its samples from 0: leave that column to Columns')
    for column, values in data.columns.items():
        if len(values) != len(data):
            raise WorkloadError(
                f"{name}(): column {column!r} has {len(values)} rows, and {len(data)} samples need a row each"
            )


def content_of(workload: Workload) -> str:
    """Return a fingerprint of the weights and the data, the same wherever these are the same bit for bit."""
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
            raise WorkloadError(f"{name} differs between two calls with one seed: {why}")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
