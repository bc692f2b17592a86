"""Writes a rank's evidence as a safetensors file, by hand: a worker has nothing but torch.

The format (8 bytes little-endian header length, a JSON header, raw bytes) is documented at
https://github.com/huggingface/safetensors#format; the parent reads it with the library.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from contextlib import suppress

import torch
from torch import Tensor

from harness.evidence.trace import RankTrace, flatten

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


CHECKSUM = "crc32"
"""The first of the file's metadata: the CRC-32 of the whole file, in hexadecimal, with zeros in its own place."""

NO_CHECKSUM = "0" * 8


SO_FAR = ".so-far"
"""How the file ends in which a process leaves what it has recorded so far; before that stands its process id."""


def so_far_of(own: str) -> str:
    """Return the file for what this process has recorded so far, beside ``own`` for its rank's whole evidence."""
    return f"{own}.{os.getpid()}{SO_FAR}"


def write(path: str, trace: RankTrace) -> None:
    """Write ``trace`` to ``path``, whole or not at all.

    Raises:
        OSError: there is no room, for instance.
    """
    values, tensors = flatten(trace)
    header: dict[str, object] = {"__metadata__": {CHECKSUM: NO_CHECKSUM, "plumbline": json.dumps(values)}}
    chunks: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        data = _bytes(tensor)
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


def _bytes(tensor: Tensor) -> bytes:
    # By its address: torch's own way to bytes needs numpy, which a rank need not have.
    flat = tensor.detach().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
