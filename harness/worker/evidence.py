"""Writes a rank's evidence as a safetensors file, by hand: a worker has nothing but torch.

The format (8 bytes little-endian header length, a JSON header, raw bytes) is documented at
https://github.com/huggingface/safetensors#format; the parent reads it with the library.
"""

from __future__ import annotations

import ctypes
import json
import os

import torch
from torch import Tensor

from harness.core.trace import RankTrace, flatten

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


def write(path: str, trace: RankTrace) -> None:
    """Write ``trace`` to ``path``, whole or not at all."""
    values, tensors = flatten(trace)
    header: dict[str, object] = {"__metadata__": {"plumbline": json.dumps(values)}}
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
    with open(f"{path}.part", "wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        file.writelines(chunks)
    os.replace(f"{path}.part", path)


def _bytes(tensor: Tensor) -> bytes:
    # By its address: torch's own way to bytes needs numpy, which a rank need not have.
    flat = tensor.detach().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
