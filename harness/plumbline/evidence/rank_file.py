"""The format of the file that one rank writes: safetensors, with everything except tensors in its metadata.

It is written and read without the library, because a rank has only torch, and `plumbline check` needs nothing else.
The format (8 bytes little-endian header length, a JSON header, raw bytes) is documented at
https://github.com/huggingface/safetensors#format. Nothing in a file is ever executed.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from plumbline.evidence.trace import Tensors

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


CHECKSUM = "crc32"
"""The first entry of the file's metadata: the CRC-32 of the whole file, in hexadecimal, computed with zeros here."""

NO_CHECKSUM = "0" * 8


def write_file(path: str, values: dict[str, Any], tensors: Tensors) -> None:
    """Write JSON values and tensors to ``path``, whole or not at all.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    header: dict[str, object] = {"__metadata__": {CHECKSUM: NO_CHECKSUM, "plumbline": json.dumps(values)}}
    chunks: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        data = tensor_bytes(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    size = len(encoded).to_bytes(8, "little")
    checksum = zlib.crc32(encoded, zlib.crc32(size))
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum)
    encoded = encoded.replace(NO_CHECKSUM.encode(), f"{checksum:08x}".encode(), 1)
    try:
        with open(f"{path}.part", "wb") as file:
            file.write(size)
            file.write(encoded)
            file.writelines(chunks)
        os.replace(f"{path}.part", path)
    except OSError:
        with suppress(OSError):
            os.unlink(f"{path}.part")
        raise


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the cpu. torch's own conversion needs numpy, which a rank need not have."""
    flat = tensor.detach().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype without the module's, such as ``bfloat16``; "" for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")
