"""The tensor store of a launch: a folder with its large tensors, each written once, by the rank that has it first.

Ranks that hold copies of the same weights, and of the same averaged gradients, write them once together, a rank that
differs writes its own. A rank decides by itself, by the name of a file, and waits for no other. Needs the standard
library and torch, since ranks use it.
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
from plumbline.evidence.dtypes import dtype_name
from plumbline.evidence.projection import fingerprint
from plumbline.evidence.trace import StoredTensor

FOLDER = "tensors"
"""The store's folder, beside the files of the launch's ranks."""

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


class TensorStore:
    """The store in ``folder``, for tensors with more than ``above`` entries, as one rank writes to it.

    ``failure`` is the first error in writing. The subject is inside of its optimizer's step then and does not see it:
    it is raised with the evidence, which would not be whole.
    """

    def __init__(self, folder: str, above: int) -> None:
        self.folder = folder
        self.above = above
        self.failure: OSError | None = None

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor belongs here; else it belongs into the rank's own file."""
        return tensor.numel() > self.above and dtype_name(tensor.dtype) in _DTYPES

    def keep(self, tensor: Tensor) -> StoredTensor:
        """Return the reference to a dense tensor, which is written unless an equal one is there."""
        stored = reference(tensor)
        try:
            if self.failure is None:
                _write(os.path.join(self.folder, _file_name(stored)), tensor.detach())
        except OSError as error:
            self.failure = error
        return stored


def reference(tensor: Tensor) -> StoredTensor:
    """Return under what a tensor is stored, if it is: equal for equal tensors."""
    return StoredTensor(fingerprint(tensor), tuple(tensor.shape), dtype_name(tensor.dtype))


def load(folder: str, stored: StoredTensor) -> Tensor:
    """Return a tensor of the store in ``folder``, mapped into memory: its file may be removed then, but not changed.

    Raises:
        TraceError: it is not there, or not as it was written; the message names the file.
    """
    path = os.path.join(folder, _file_name(stored))
    dtype, count = _DTYPES.get(stored.dtype), prod(stored.shape)
    try:
        # What the trace says of the type is a part of the name; a link leads out of the run, and a pipe never ends.
        if dtype is None or not stat.S_ISREG((found := os.lstat(path)).st_mode):
            raise ValueError("it is no plain file of a tensor")
        if found.st_size != count * dtype.itemsize:
            raise ValueError(f"it is no tensor of {list(stored.shape)} {stored.dtype}")
        tensor = torch.from_file(path, shared=False, size=count, dtype=dtype).view(stored.shape)
        if reference(tensor) != stored:
            raise ValueError("it was changed after it was written")
    except (OSError, ValueError, RuntimeError) as error:
        raise TraceError(f"{path} is not whole ({error}); run the cell again") from error
    return tensor


def _write(path: str, tensor: Tensor) -> None:
    """Write a tensor's entries to a new file; nothing where the file is there."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileExistsError), open(path, "xb") as file:  # which one process alone can do
        values = tensor.cpu().contiguous()
        # By its address: torch's own conversion to bytes needs numpy, which a rank need not have.
        file.write((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))


def _file_name(stored: StoredTensor) -> str:
    return f"{stored.fingerprint & 2**64 - 1:016x}-{'x'.join(map(str, stored.shape))}-{stored.dtype}"
