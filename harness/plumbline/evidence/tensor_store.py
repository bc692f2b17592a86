"""The tensor store of a launch: a folder with its large tensors, each written once, by the first rank that has it.

Ranks with equal weights or equal averaged gradients share one file; a rank that differs writes its own. Each rank
decides by whether the file exists, and does not wait for others. Needs only the standard library and torch, because
ranks use it.
"""

from __future__ import annotations

import ctypes
import os
import stat
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from plumbline.core.errors import TraceError
from plumbline.evidence.projection import fingerprint
from plumbline.evidence.rank_file import dtype_name
from plumbline.evidence.trace import StoredTensor

FOLDER = "tensors"
"""The store's folder, beside the files of the launch's ranks."""

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


class TensorStore:
    """The store in ``folder``, for tensors with more than ``above`` entries, as one rank writes to it.

    ``failure`` is the first error in writing. It is not raised inside of the subject's optimizer step, but later with
    the evidence, which is incomplete.
    """

    def __init__(self, folder: str, above: int) -> None:
        self.folder = folder
        self.above = above
        self.failure: OSError | None = None

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is kept here instead of in the rank's own file."""
        return tensor.numel() > self.above and dtype_name(tensor.dtype) in _DTYPES

    def keep(self, tensor: Tensor) -> StoredTensor:
        """Return the reference to a dense tensor, and write the tensor unless an equal one is stored."""
        stored = reference(tensor)
        try:
            if self.failure is None:
                _write(os.path.join(self.folder, _file_name(stored)), tensor.detach())
        except OSError as error:
            self.failure = error
        return stored


def reference(tensor: Tensor) -> StoredTensor:
    """Return the reference that a tensor is stored under; equal tensors have equal references."""
    return StoredTensor(fingerprint(tensor), tuple(tensor.shape), dtype_name(tensor.dtype))


def load(folder: str, stored: StoredTensor) -> Tensor:
    """Return a tensor of the store in ``folder``, mapped into memory: its file may be removed, but not changed."""
    path = os.path.join(folder, _file_name(stored))
    dtype, count = _DTYPES.get(stored.dtype), prod(stored.shape)
    try:
        # The dtype comes from the trace. A link leads out of the run, and a pipe never ends.
        if dtype is None or not stat.S_ISREG((found := os.lstat(path)).st_mode):
            raise ValueError("it is not a regular file of a tensor")
        if found.st_size != count * dtype.itemsize:
            raise ValueError(f"its size is not that of a {stored.dtype} tensor of shape {list(stored.shape)}")
        tensor = torch.from_file(path, shared=False, size=count, dtype=dtype).view(stored.shape)
        if reference(tensor) != stored:
            raise ValueError("it was changed after it was written")
    except (OSError, ValueError, RuntimeError) as error:
        raise TraceError(f"{path} is missing or damaged ({error}); run the cell again") from error
    return tensor


def _write(path: str, tensor: Tensor) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileExistsError), open(path, "xb") as file:  # only one process can do this
        values = tensor.cpu().contiguous()
        # By its address: torch's own conversion to bytes needs numpy, which a rank need not have.
        file.write((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))


def _file_name(stored: StoredTensor) -> str:
    return f"{stored.fingerprint & 2**64 - 1:016x}-{'x'.join(map(str, stored.shape))}-{stored.dtype}"
