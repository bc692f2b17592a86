"""Finds where tensors are in memory that other processes can share."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from torch import Tensor


def shared_places(tensors: Iterable[Tensor]) -> dict[int, str]:
    """Return each tensor's place in shared memory, by its number. It is the same in every process that shares it.

    A place is the host, the mapped file and the offset in the file. Tensors in a process's own memory or on
    accelerators are left out. If the system has no ``/proc/self/maps``, all tensors are left out.
    """
    addresses = {
        number: tensor.data_ptr()
        for number, tensor in enumerate(tensors)
        if tensor.device.type == "cpu" and tensor.numel() and tensor.is_shared()  # type: ignore[no-untyped-call]
    }
    if not addresses:
        return {}
    mapped = list(_mappings())
    places = {}
    for number, address in addresses.items():
        for start, end, offset, file in mapped:
            if start <= address < end:
                places[number] = f"{platform.node()} {file} {offset + address - start}"
    return places


def _mappings() -> Iterable[tuple[int, int, int, str]]:
    """Yield the begin, the end, the offset and the file of each shared mapping (proc(5))."""
    try:
        with open("/proc/self/maps") as lines:
            for line in lines:
                addresses, modes, offset, device, inode, *path = line.split(maxsplit=5)
                if modes.endswith("s") and inode != "0":
                    start, end = (int(number, 16) for number in addresses.split("-"))
                    yield start, end, int(offset, 16), " ".join([device, inode, *(part.strip() for part in path)])
    except OSError:
        return
